"""Every policy loss in plain Python, token by token with its derivative, and cases to try it on."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hybridrl.algorithms import covariance_losses, policy_losses
from hybridrl.algorithms.token_loss import TokenLoss

LENGTHS = (5, 1, 9, 7, 3)
CLIP = {"clip_low": 0.2, "clip_high": 0.3}


@dataclass
class Token:
    """One token as the formulas see it; `mean` is the mean log-ratio of its response."""

    log_prob: float
    log_ratio: float
    advantage: float
    mean: float
    selected: bool

    @property
    def ratio(self) -> float:
        return math.exp(self.log_ratio)


# Each: token -> (loss, derivative of the loss by the token's log-prob).


def of_ppo_clip(token: Token, low: float = 0.2, high: float = 0.3) -> tuple[float, float]:
    ratio, advantage = token.ratio, token.advantage
    clipped = min(max(ratio, 1 - low), 1 + high)
    if ratio * advantage <= clipped * advantage:
        return -ratio * advantage, -ratio * advantage
    return -clipped * advantage, 0.0


def of_dual_clip(token: Token) -> tuple[float, float]:
    loss, slope = of_ppo_clip(token)
    if token.advantage < 0 and loss > -1.5 * token.advantage:
        return -1.5 * token.advantage, 0.0
    return loss, slope


def of_cispo(token: Token) -> tuple[float, float]:
    weight = min(max(token.ratio, 0.8), 1.3)
    return -weight * token.advantage * token.log_prob, -weight * token.advantage


def of_gspo(token: Token) -> tuple[float, float]:
    ratio, advantage = math.exp(token.mean), token.advantage
    clipped = min(max(ratio, 0.8), 1.3)
    if ratio * advantage <= clipped * advantage:
        return -ratio * advantage, -ratio * advantage
    return -clipped * advantage, 0.0


def of_sapo(token: Token) -> tuple[float, float]:
    tau = 1.0 if token.advantage > 0 else 1.5
    gate = 1 / (1 + math.exp(-tau * (token.ratio - 1)))
    slope = 4 * gate * (1 - gate) * token.ratio * token.advantage
    return -4 / tau * gate * token.advantage, -slope


def of_dppo(token: Token, divergence: Callable[[float, float], float]) -> tuple[float, float]:
    p, q = math.exp(token.log_prob), math.exp(token.log_prob - token.log_ratio)
    away = (p > q and token.advantage > 0) or (p < q and token.advantage < 0)
    weight = 0.0 if away and divergence(p, q) > 0.05 else min(p / q, 1.2)
    return -weight * token.advantage, -weight * token.advantage


def binary_kl(p: float, q: float) -> float:
    return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


def of_clip_cov(token: Token) -> tuple[float, float]:
    loss, slope = of_ppo_clip(token)
    return loss, 0.0 if token.selected else slope


def of_kl_cov(token: Token) -> tuple[float, float]:
    ratio = token.ratio
    loss, slope = -ratio * token.advantage, -ratio * token.advantage
    if token.selected:
        sign = math.copysign(1, token.log_ratio)
        return loss + 0.7 * abs(token.log_ratio), slope + 0.7 * sign
    return loss, slope


Loss = Callable[..., TokenLoss]
LOSSES: dict[str, tuple[Loss, Callable[[Token], tuple[float, float]]]] = {
    "ppo_clip": (partial(policy_losses.ppo_clip, **CLIP), of_ppo_clip),
    "dual_clip": (partial(policy_losses.dual_clip, **CLIP, max_ratio=1.5), of_dual_clip),
    "cispo": (partial(policy_losses.cispo, **CLIP), of_cispo),
    "gspo": (partial(policy_losses.gspo, **CLIP), of_gspo),
    "sapo": (partial(policy_losses.sapo, tau_positive=1.0, tau_negative=1.5), of_sapo),
    "dppo_tv": (
        partial(policy_losses.dppo_tv, max_divergence=0.05, max_ratio=1.2),
        partial(of_dppo, divergence=lambda p, q: abs(p - q)),
    ),
    "dppo_kl": (
        partial(policy_losses.dppo_kl, max_divergence=0.05, max_ratio=1.2),
        partial(of_dppo, divergence=binary_kl),
    ),
    "clip_cov": (partial(covariance_losses.clip_cov, **CLIP), of_clip_cov),
    "kl_cov": (partial(covariance_losses.kl_cov, coef=0.7), of_kl_cov),
}


def arguments(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    """Log-probs, those they are compared with, advantages, mask, and what else the loss takes."""
    generator = torch.Generator().manual_seed(seed)
    size = sum(LENGTHS)
    old = -2.5 * torch.rand(size, generator=generator, dtype=dtype) - 0.05
    log_probs = (old + 0.4 * torch.randn(size, generator=generator, dtype=dtype)).clamp(max=-0.01)
    advantages = torch.randn(size, generator=generator, dtype=dtype)
    mask = torch.arange(size) % 6 != 4
    taken = [log_probs, old, advantages, mask]
    if name == "gspo":
        taken.append(torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS)))
    if name.endswith("cov"):
        taken.append(torch.arange(size) % 4 == 1)
    return taken


def expected(name: str, taken: list[Tensor]) -> tuple[list[float], list[float]]:
    """Losses and derivatives by the formulas, 0 off the mask."""
    log_probs, old, advantages, mask = taken[:4]
    losses, slopes, start = [], [], 0
    for length in LENGTHS:
        rows = range(start, start + length)
        log_ratios = {i: float(log_probs[i]) - float(old[i]) for i in rows if mask[i]}
        for i in rows:
            if not mask[i]:
                losses.append(0.0)
                slopes.append(0.0)
                continue
            loss, slope = LOSSES[name][1](
                Token(
                    log_prob=float(log_probs[i]),
                    log_ratio=log_ratios[i],
                    advantage=float(advantages[i]),
                    mean=math.fsum(log_ratios.values()) / len(log_ratios),
                    selected=name.endswith("cov") and bool(taken[4][i]),
                )
            )
            losses.append(loss)
            slopes.append(slope)
        start += length
    return losses, slopes
