"""Reward functions (prompt, response, example, **args) -> float, run in their own processes.

Built-in rewards: gsm8k.py, math_answer.py, code.py, format.py, none.py, http.py and judge.py with
their requests in remote.py, and weighted.py for sums of them. base.py defines the interface;
calls.py calls functions with verl's and TRL's signature, too. scorer.py scores batches with the
processes of processes/. sandbox/ isolates programs under test for code.py.

The trainer's side is in trainer/rewarding.py; reward models are in workers/reward_model.py.
Start with base.py, then gsm8k.py as an example.
"""
