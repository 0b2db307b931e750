"""Checkpoints of a run as the trainer writes, verifies and resumes them."""
