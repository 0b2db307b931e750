"""The training loop, evaluation and what the user sees."""
