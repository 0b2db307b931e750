"""Checks of the inputs of a run (ids inputs.*): models, caches, data, reward, run directory.

Nothing is downloaded. Not here: free disk space in /tmp (doctor/host), keys of the config.
Start with stage.py.
"""
