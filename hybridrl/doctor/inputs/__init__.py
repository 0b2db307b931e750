"""Checks of what a run reads and writes: model, data, caches and the run directory."""
