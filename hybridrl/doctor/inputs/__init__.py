"""Checks of the inputs of a run (ids inputs.*): models, caches, data, reward, run directory.

models.py reads model folders and hub snapshots on every node and compares them; folders.py examines
the caches and the run directory; samples.py tries tokenizer, data and reward on a few rows.
Nothing is downloaded. Not here: free disk space in /tmp (doctor/host), keys of the config.
Start with stage.py.
"""
