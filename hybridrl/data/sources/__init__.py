"""Prompts of a run: read, filtered, mixed, ordered, rendered and tokenised.

Rows (files.py, hub.py, problems.py for the embedded set) become problems (rows.py), one set per
entry of data.mixture (problem_sets.py, filters.py), then prompts (prompts.py, tokenizer.py).
prompt_sets.py runs all of it; prompt_source.py draws prompts in training order (order.py).

Rewards are in rewards/; config checks without data access are in config/checks.
Start with prompt_sets.load_prompts.
"""
