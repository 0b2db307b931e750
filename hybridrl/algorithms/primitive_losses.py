"""Losses of the primitive `forward_backward`: a value for each token, whose sum is minimised.

Names, inputs and settings are those of Tinker. Nothing is divided: who calls chooses weights and
advantages. `r_t` is exp(log_probs_t - logprobs_t).

    cross_entropy         -weights_t log_probs_t
    importance_sampling   -r_t A_t
    ppo                   -min(r_t A_t, clip(r_t) A_t)
    cispo                 -sg(clip(r_t)) A_t log_probs_t
    gspo                  as ppo, with the ratio of the sequence's tokens in sequence_ratio_mask
    dro                   -log_probs_t A_t + beta / 2 (log r_t)^2

Clips are to [clip_low_threshold, clip_high_threshold], 0.8 and 1.2 unless set; beta is 0.05.

Source: https://tinker-docs.thinkingmachines.ai/losses; those of the losses in
    algorithms/policy_losses.py; Richemond et al. 2024 (DRO), https://arxiv.org/abs/2405.19107
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridrl.algorithms.policy_losses import cispo, gspo, ppo_clip
from hybridrl.algorithms.token_loss import policy_inputs
from hybridrl.data.batch import RolloutBatch

# Inputs by the field of a batch that holds them.
FIELDS = {
    "weights": "loss_weights",
    "logprobs": "old_log_probs",
    "advantages": "advantages",
    "sequence_ratio_mask": "loss_mask",
}
LOW, HIGH, BETA = "clip_low_threshold", "clip_high_threshold", "beta"
CLIP = {LOW: 0.8, HIGH: 1.2}
# Log-probs, fields of the batch by name, settings -> values of the tokens.
Fields = Mapping[str, Tensor]
Settings = Mapping[str, float]


class Loss(NamedTuple):
    """A loss: the inputs of its data, its settings with their defaults, and its function."""

    inputs: tuple[str, ...]
    settings: Settings
    values: Callable[[Tensor, Fields, Settings], Tensor]


def _cross_entropy(log_probs: Tensor, fields: Fields, settings: Settings) -> Tensor:
    return -fields["loss_weights"] * log_probs


def _importance_sampling(log_probs: Tensor, fields: Fields, settings: Settings) -> Tensor:
    log_ratio, advantages = policy_inputs("importance_sampling", log_probs, *_policy(fields))
    return -log_ratio.exp() * advantages


def _ppo(log_probs: Tensor, fields: Fields, settings: Settings) -> Tensor:
    return ppo_clip(log_probs, *_policy(fields), **_clip(settings)).values


def _cispo(log_probs: Tensor, fields: Fields, settings: Settings) -> Tensor:
    return cispo(log_probs, *_policy(fields), **_clip(settings)).values


def _gspo(log_probs: Tensor, fields: Fields, settings: Settings) -> Tensor:
    old, advantages, _ = _policy(fields)
    mask, rows = fields["loss_mask"], fields["sequence_id"]
    return gspo(log_probs, old, advantages, mask, rows, **_clip(settings)).values


def _dro(log_probs: Tensor, fields: Fields, settings: Settings) -> Tensor:
    old, advantages, _ = _policy(fields)
    penalty = settings[BETA] / 2 * (log_probs - old).square()
    return penalty - log_probs * advantages


def _policy(fields: Fields) -> tuple[Tensor, Tensor, Tensor]:
    old, advantages = fields["old_log_probs"], fields["advantages"]
    return old, advantages, torch.ones_like(old, dtype=torch.bool)


def _clip(settings: Settings) -> dict[str, float]:
    return {"clip_low": 1 - settings[LOW], "clip_high": settings[HIGH] - 1}


_POLICY = ("logprobs", "advantages")
LOSSES = {
    "cross_entropy": Loss(("weights",), {}, _cross_entropy),
    "importance_sampling": Loss(_POLICY, {}, _importance_sampling),
    "ppo": Loss(_POLICY, CLIP, _ppo),
    "cispo": Loss(_POLICY, CLIP, _cispo),
    "gspo": Loss((*_POLICY, "sequence_ratio_mask"), CLIP, _gspo),
    "dro": Loss(_POLICY, {BETA: 0.05}, _dro),
}


def loss_of(name: str, settings: Settings) -> tuple[Loss, Settings]:
    """Return a loss and all its settings.

    Raises:
        ValueError: there is no such loss, or it has no such setting, or a clip leaves no range.
    """
    if name not in LOSSES:
        raise ValueError(f"loss {name}: expected one of {', '.join(LOSSES)}")
    loss = LOSSES[name]
    if unknown := sorted(settings.keys() - loss.settings.keys()):
        expected = ", ".join(loss.settings) or "none"
        raise ValueError(f"loss {name} has no setting {unknown[0]}: expected {expected}")
    whole = {**loss.settings, **settings}
    if LOW in whole and not 0 <= whole[LOW] < 1 < whole[HIGH]:
        raise ValueError(
            f"loss {name}: {LOW} = {whole[LOW]:g}, {HIGH} = {whole[HIGH]:g}, expected "
            f"0 <= {LOW} < 1 < {HIGH}: ratios of 1 would be clipped"
        )
    return loss, whole


def fields_of(loss: Loss, batch: RolloutBatch) -> Fields:
    """Return what a loss takes of a batch, [N] each, and the masks of its tokens."""
    tensors = batch.tensors()
    named: dict[str, Any] = {FIELDS[one]: tensors[FIELDS[one]] for one in loss.inputs}
    named["response_mask"] = batch.response_mask
    flat = {name: ragged.values for name, ragged in named.items()}
    return flat | {"sequence_id": batch.responses.row_ids()}


def loss_sum(loss: Loss, settings: Settings, log_probs: Tensor, fields: Fields) -> Tensor:
    """Sum a loss over the tokens of response_mask: a scalar with graph."""
    values = loss.values(log_probs, fields, settings)
    return values.masked_fill(~fields["response_mask"], 0.0).sum()
