"""Health checks of a run: what is wrong with it, by its metrics.

measures.py: metrics that only checks need, from a step's responses and from the prompts.
judges.py: from metrics to a sentence of evidence.
checks.py: the checks by id, with their remedies.
health.py: what is said, and when.
"""
