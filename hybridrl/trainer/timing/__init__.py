"""Timing of a step: phases, idle time, throughput, profiles, warnings.

phases.py: wall time of each phase, idle time of the ranks; start reading there.
throughput.py, engines.py: tokens per second, MFU, stragglers; profiling.py: traces.

Elsewhere: controller/spans.py (spans of worker calls), tracking/ (output).
"""
