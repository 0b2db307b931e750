"""Pure functions on tensors: advantages, policy and value losses, KL, rollout correction.

No config, no processes, no models: every function states its equation, shapes, units and source.

Start with advantages.py (GAE, shapes and conventions) and policy_losses.py (PPO's loss token by
token), then token_loss.py (from tokens to the scalar of a mini-batch). config/estimators.py and
config/policy_losses.py map names in the config to these functions. The trainer applies advantages
to a batch in trainer/advantage.py; the actor applies losses in workers/actor.py.
"""

from hybridrl.algorithms.advantages import (
    Estimate,
    gae,
    group_wise,
    overlong_penalty,
    reinforce_plus_plus,
    remax,
    whitened,
)
from hybridrl.algorithms.covariance_losses import clip_cov, kl_cov
from hybridrl.algorithms.distillation import distillation_advantages, spread
from hybridrl.algorithms.group_advantages import (
    dr_grpo,
    grpo,
    opo,
    pass_at_k,
    reinforce_plus_plus_baseline,
    rloo,
)
from hybridrl.algorithms.losses import (
    adapt_coef,
    entropy_bonus,
    estimate_kl,
    kl_penalty,
    kl_penalty_rewards,
    nll,
    value_loss,
)
from hybridrl.algorithms.masked import masked_mean, masked_sum, masked_whiten
from hybridrl.algorithms.policy_losses import (
    cispo,
    dppo_kl,
    dppo_tv,
    dual_clip,
    gspo,
    ppo_clip,
    sapo,
)
from hybridrl.algorithms.preference_losses import bradley_terry, dpo, ipo, kto
from hybridrl.algorithms.rollout_correction import correction_weights, importance_ratios
from hybridrl.algorithms.token_loss import TokenLoss, aggregate

__all__ = [
    "Estimate",
    "TokenLoss",
    "adapt_coef",
    "aggregate",
    "bradley_terry",
    "cispo",
    "clip_cov",
    "correction_weights",
    "distillation_advantages",
    "dpo",
    "dppo_kl",
    "dppo_tv",
    "dr_grpo",
    "dual_clip",
    "entropy_bonus",
    "estimate_kl",
    "gae",
    "group_wise",
    "grpo",
    "gspo",
    "importance_ratios",
    "ipo",
    "kl_cov",
    "kl_penalty",
    "kl_penalty_rewards",
    "kto",
    "masked_mean",
    "masked_sum",
    "masked_whiten",
    "nll",
    "opo",
    "overlong_penalty",
    "pass_at_k",
    "ppo_clip",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "sapo",
    "spread",
    "value_loss",
    "whitened",
]
