"""Reward functions (prompt, response, example, **args) -> float, run in their own processes.

Built-in rewards: gsm8k.py, math_answer.py, code.py, format.py, http.py, none.py, and weighted.py
for sums of them. base.py defines the interface and resolves dotted paths.
scorer.py scores batches with a pool of processes (pool.py, process.py, child.py), which exchange
the messages of messages.py over wire.py. sandbox/ isolates programs under test for code.py.

The trainer's side is in trainer/rewarding.py; reward models are in workers/reward_model.py.
Start with base.py, then gsm8k.py as an example.
"""
