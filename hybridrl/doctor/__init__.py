"""Checks of a cluster before a run, in stages: from the host to two training steps.

A probe is a module-level function that runs on every node and returns plain values. A rule compares
these values with limits and makes a `Finding` (findings.py): check id, node, severity, evidence and
remedy. context.py has their input; gather.py calls probes.
Rooms: host (each machine), network (between machines), ray (the head), inputs (models and data).

Not here: checks of the config (hybridrl.config.checks) and of a running job (hybridrl.controller).
Start with preflight.py, which lists the stages, or main.py, the command.
"""
