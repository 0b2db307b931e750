"""Evaluation of a checkpoint or model: `hybridrl eval`.

options.py parses the command line; subject.py finds the checkpoint or model; config.py builds and
checks the config. session.py samples, scores and writes every response, report.py computes and
writes the results. Evaluation during training is in trainer/evaluate.py. Start with
commands/evaluate.py, then session.py.
"""
