"""Checks of each host: GPUs, memory, processes' limits and variables."""
