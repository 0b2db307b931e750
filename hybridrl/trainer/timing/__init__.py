"""Timing of a step.

phases.py: wall time of each phase, idle time of the ranks, traces; start reading there.
throughput.py, engines.py: tokens per second, MFU, stragglers.

Elsewhere: controller/calls.py (spans of worker calls), tracking/ (output).
"""
