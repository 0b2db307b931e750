"""Sources of the groups that a step trains on.

source.py: `Source`, the seam, and what the algorithm wants of any; start reading there.
whole.py, partial.py, split.py: the schedules. dynamic.py: dynamic sampling around any of them.
generation.py: whole responses with the actor's weights.
hybrid_engine.py: the weights that vLLM holds.
"""
