"""Prompts of a run: read, filtered, mixed, ordered, rendered and tokenised.

Rows (files.py, also from the hub; problems.py for the embedded set) become problems (rows.py), one
set per entry of data.mixture (problem_sets.py), then prompts (prompts.py, tokenizer.py).
prompt_source.py draws prompts in training order (order.py).

Rewards are in rewards/; config checks without data access are in config/checks.
Start with prompts.load_prompts.
"""
