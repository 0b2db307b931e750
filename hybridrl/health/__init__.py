"""Health checks of a run: what is wrong with it, by its metrics.

checks.yaml: the checks by id, with their remedies.
judges.py: from metrics to a sentence of evidence.
measures.py: metrics that only checks need, from a step's responses.
observer.py: warnings of a step, and health.jsonl; start reading there.
"""
