"""Batches of updates that were not finite, and their replay."""
