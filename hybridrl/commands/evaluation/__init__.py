"""Scoring a checkpoint or a model on a data set: pass@1, pass@k, completions."""
