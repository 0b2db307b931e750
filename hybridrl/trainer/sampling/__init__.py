"""Sampling of the responses that a step trains on.

base.py: `Sampling`, which samples each response to its end; start reading there.
drafts.py: responses so far, and what follows their turns.
partial.py: partial rollouts, whose unfinished responses (in_flight.py) later steps continue.
split.py: the same on ranks of their own, beside training.
hybrid_engine.py: the weights that vLLM holds.
"""
