"""Environments: what answers the model between its turns, run outside the trainer."""
