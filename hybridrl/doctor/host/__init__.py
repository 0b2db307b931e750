"""Checks of each host (ids host.*): its limits, memory, GPUs and environment, and differences.

facts.py is the probe, gpus.py that of the GPUs with its rules. Rules: limits.py (ulimit, cgroup,
/dev/shm, /tmp), variables.py (environment), stage.py (versions, clocks).
Not here: addresses and interfaces (doctor/network), predicted memory (doctor/memory.py).
Start with stage.py.
"""
