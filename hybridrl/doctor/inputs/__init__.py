"""Checks of the inputs of a run (ids inputs.*): models, caches, data, reward, run directory.

models.py reads model folders and hub snapshots on every node and compares them; cache.py examines
the caches; samples.py tries tokenizer, data and reward on a few rows; run_directory.py
writes a file.
Nothing is downloaded. Not here: free disk space in /tmp (doctor/host), keys of the config.
Start with stage.py.
"""
