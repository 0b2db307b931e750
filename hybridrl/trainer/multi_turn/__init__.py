"""Rollouts in turns with an environment."""
