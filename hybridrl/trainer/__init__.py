"""The training loop and its parts on the driver; no weights are here.

loop.py: `TrainingLoop.fit` and `step`; ppo.py, sft.py: what a step trains on. Start reading there.
sampling/, rewarding.py, advantage.py: from prompts to the inputs of the update.
mismatch.py, state.py, evaluate.py: checks, resumes, held-out accuracy.
factory.py: builds generation and rewards.

Elsewhere: algorithms/ (formulas), workers/ (computation on the ranks), app/ (builds the trainer).
"""
