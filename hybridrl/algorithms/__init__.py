"""Pure functions on tensors: advantages, policy and value losses, KL, rollout correction.

No config, no processes, no models: every function states its equation, shapes, units and source.

Start with advantages.py (GAE, shapes and conventions) and policy_losses.py (PPO's loss token by
token), then token_loss.py (from tokens to the scalar of a mini-batch). config/estimators.py and
config/policy_losses.py map names in the config to these functions. The trainer applies advantages
to a batch in trainer/advantage.py; the actor applies losses in workers/actor.py.
"""
