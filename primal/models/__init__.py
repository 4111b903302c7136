"""Models: one encoder, whose attention is a part, and what is put around it for each task."""
