"""Timing of a step: phases, idle time, throughput, profiles, warnings.

phases.py: wall time of each phase; start reading there.
timeline.py: idle time of the ranks, and the Chrome trace.
throughput.py, engines.py: tokens per second, MFU, stragglers.
profiling.py, grace.py: torch profiler; time for a checkpoint after SIGTERM.

Elsewhere: controller/calls.py (spans of worker calls), tracking/ (output).
"""
