"""Evaluation of a checkpoint or model: parts of `hybridrl eval`.

Start with commands/evaluate.py, then session.py. Evaluation during training: trainer/evaluate.py.
"""
