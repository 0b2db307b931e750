"""Sources of the groups that a step trains on.

source.py: `Source`, the seam, with sync, and what the algorithm wants of any; start reading there.
partial.py, split.py: the other schedules. dynamic.py: dynamic sampling around any of them.
hybrid_engine.py: the weights that vLLM holds. start_check.py: samples before the first step, which
are compared with the trainer's numbers.
"""
