"""Checks of a cluster before a run, in stages: from the host to two training steps.

A probe is a module-level function that runs on every node and returns plain values. A rule compares
these with limits and makes a `Finding` (findings.py). stages.py has their input.
Not here: checks of the config (hybridrl.config.checks) and of a running job (hybridrl.controller).
Start with main.py: the command, the checks at the start of a run, and the list of stages.
"""
