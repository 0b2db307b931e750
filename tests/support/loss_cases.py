"""The losses of losses.py, each as a mean over a count, and their formulas; PPO's likewise."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from hybridrl.algorithms.losses import entropy_bonus, kl_penalty, value_loss
from hybridrl.algorithms.masked import masked_sum
from hybridrl.algorithms.policy_losses import ppo_clip
from hybridrl.algorithms.token_loss import TokenLoss
from hybridrl.config.choices import KLEstimator

Loss = Callable[..., tuple[Tensor, dict[str, Tensor]]]


def mean_of(function: Callable[..., TokenLoss], **settings) -> Loss:
    """A loss of tokens as the mean over a count, as `value_loss` is one."""

    def loss(*tensors: Tensor, num_tokens: float) -> tuple[Tensor, dict[str, Tensor]]:
        values, sums = function(*tensors, **settings)
        assert values.shape == tensors[0].shape
        assert not values[~tensors[-1]].any()
        return masked_sum(values, tensors[-1]) / num_tokens, sums

    return loss


policy_loss = mean_of(ppo_clip, clip_low=0.2, clip_high=0.2)
# loss, number of token tensors before the mask
LOSSES: dict[str, tuple[Loss, int]] = {
    "value": (partial(value_loss, value_clip=0.2), 3),
    "entropy": (mean_of(entropy_bonus, coef=0.1), 1),
    "kl_k1": (mean_of(kl_penalty, coef=0.1, estimator=KLEstimator.k1), 2),
    "kl_k2": (mean_of(kl_penalty, coef=0.1, estimator=KLEstimator.k2), 2),
    "kl_k3": (mean_of(kl_penalty, coef=0.1, estimator=KLEstimator.k3), 2),
    "kl_k1_straight_through": (
        mean_of(kl_penalty, coef=0.1, estimator=KLEstimator.k1_straight_through),
        2,
    ),
    "kl_k3_straight_through": (
        mean_of(kl_penalty, coef=0.1, estimator=KLEstimator.k3_straight_through),
        2,
    ),
}


def tokens(name: str, size: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    count = LOSSES[name][1]
    return [0.5 * torch.randn(size, generator=generator, dtype=dtype) for _ in range(count)]


def mask_of_two_thirds(size: int) -> Tensor:
    return torch.arange(size) % 3 != 1


def all_true(size: int) -> Tensor:
    return torch.ones(size, dtype=torch.bool)


def reference(name: str, fields: list[float]) -> float:
    """One token's loss before the division, from the formulas, in Python floats."""
    if name == "value":
        value, old, target = fields
        inside = min(max(value, old - 0.2), old + 0.2)
        return 0.5 * max((value - target) ** 2, (inside - target) ** 2)
    if name == "entropy":
        return -0.1 * fields[0]
    d = fields[0] - fields[1]
    base = name.removesuffix("_straight_through")
    return 0.1 * {"kl_k1": d, "kl_k2": d * d / 2, "kl_k3": math.exp(-d) - 1 + d}[base]
