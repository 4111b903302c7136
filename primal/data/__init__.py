"""Data as a model reads it: files of series, sets of the UEA archive, events."""
