"""Training: the loop, its optimizers, checkpoints and processes; series in, a predictor out."""
