"""The training loop and its parts on the driver; no weights are here.

ppo.py: `PPOTrainer`, one short method per phase; start reading there.
generation.py, sampling.py, baseline.py: responses; factory.py builds generators and rewards.
rewarding.py, reward_model.py, kl_control.py, value_function.py, advantage.py, loss_inputs.py: from
responses to the inputs of the update.
hybrid_engine.py, mismatch.py, state.py, evaluate.py: weight versions, checks, resumes, accuracy.

Elsewhere: algorithms/ (formulas), workers/ (computation on the ranks), app/ (builds the trainer).
"""
