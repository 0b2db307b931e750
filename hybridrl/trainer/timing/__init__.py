"""Timing of a step.

phases.py: wall time of each phase; start reading there.
timeline.py: idle time of the ranks, traces.
throughput.py, engines.py: tokens per second, MFU, stragglers.

Elsewhere: controller/calls.py (spans of worker calls), tracking/ (output).
"""
