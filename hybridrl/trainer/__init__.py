"""The training loop and its parts on the driver; no weights are here.

ppo.py: `PPOTrainer`, one short method per phase; start reading there.
sampling.py, rewarding.py, advantage.py: from prompts to the inputs of the update.
mismatch.py, state.py, evaluate.py: checks, resumes, held-out accuracy.
factory.py: builds generation and rewards.

Elsewhere: algorithms/ (formulas), workers/ (computation on the ranks), app/ (builds the trainer).
"""
