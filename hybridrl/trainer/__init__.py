"""The training loop and its parts on the driver; no weights are here.

step.py: the loop and a step of PPO, on one page; record.py: what phases return. Read these first.
rollouts.py, scoring.py, advantage.py, updates.py: the phases; sft.py: supervised fine-tuning.
evaluate.py, mismatch.py, state.py: held-out accuracy, a check of vLLM's log-probs, resumes.
build.py, factory.py: assemble the loop, generation and rewards.

Elsewhere: algorithms/ (formulas), workers/ (computation on the ranks), app/ (builds the trainer).
"""
