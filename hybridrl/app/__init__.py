"""Application: from the composed config to the training loop, with Ray, restarts and sweeps.

Start with launch.py, then session.py. The loop is in trainer/, Hydra's entry point is main.py.
"""
