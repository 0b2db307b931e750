"""Evaluation of a checkpoint or model: `hybridrl eval`.

options.py parses the command line; subject.py finds the checkpoint or model; config.py builds and
checks the config. session.py samples, scores and writes every response, report.py the results, with
statistics.py for pass@k and confidence intervals. Evaluation during training is in
trainer/evaluate.py. Start with commands/evaluate.py, then session.py.
"""
