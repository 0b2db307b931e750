"""Evaluation of a checkpoint or a model: what it is (subject.py), sampling, results."""
