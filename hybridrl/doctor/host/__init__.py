"""Checks of each host (ids host.*): its limits, memory, GPUs and environment, and differences.

Probes: facts.py, cgroup.py, gpus.py. Rules: limits.py (ulimit, cgroup, /dev/shm, /tmp), gpus.py,
variables.py (environment), cluster.py (versions, variables and clocks between nodes).
Not here: addresses and interfaces (doctor/network), predicted memory (doctor/memory.py).
Start with stage.py.
"""
