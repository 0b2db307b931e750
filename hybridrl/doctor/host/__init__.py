"""Checks of each host (ids host.*): its limits, memory, GPUs and environment, and differences.

facts.py and gpus.py are the probes. Not here: addresses and interfaces (doctor/network), predicted
memory (doctor/room.py). Start with stage.py.
"""
