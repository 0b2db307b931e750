"""Application: from the composed config to the training loop, with Ray, restarts and sweeps.

compose.py composes and examines a config; launch.py reads data, starts Ray and restarts failed
runs; session.py opens everything the trainer needs. process.py has signals and exit codes,
sweep.py the table of a sweep. The loop itself is in
trainer/, Hydra's entry point in hybridrl/main.py. Start with launch.py.
"""
