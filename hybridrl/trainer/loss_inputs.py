"""Further inputs of the policy loss, computed for the whole step at once.

loss_weights: importance weights against the sampler's mismatch; selected: tokens that the loss
treats differently.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from hybridrl.algorithms.covariance_losses import covariances
from hybridrl.algorithms.masked import on_mask
from hybridrl.algorithms.rollout_correction import (
    correction_weights,
    importance_ratios,
    mismatch_from,
    mismatch_sums,
)
from hybridrl.config.algorithm_schema import AlgorithmConfig, RolloutCorrectionConfig
from hybridrl.config.choices import CorrectionMethod
from hybridrl.config.policy_losses import KEY, policy_loss_of
from hybridrl.config.user_code.classes import locate
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.blocks import PaddedBlocks, row_chunks
from hybridrl.data.ragged import Ragged
from hybridrl.data.seeds import derive_seed

# (batch, step) -> fields, metrics
Part = Callable[[RolloutBatch, int], tuple[dict[str, Ragged], dict[str, float]]]


class LossInputs:
    """Fields that the run's policy loss needs, beside log-probs and advantages.

    Args:
        config: the algorithm section, checked.
        seed: of the run.
    """

    def __init__(self, config: AlgorithmConfig, seed: int) -> None:
        loss = policy_loss_of(config.loss.function)
        self._parts: list[Part] = [mismatch]
        if config.rollout_correction.method is not CorrectionMethod.none and (
            not loss.is_against_rollout
        ):
            self._parts.append(Correction(config.rollout_correction))
        if loss.selection is not None:
            select = locate(f"{KEY}.function", loss.selection)
            settings = {name: config.loss.args[name] for name in loss.selection_settings}
            self._parts.append(Selection(select, settings, seed))

    def of_step(self, batch: RolloutBatch, step: int) -> tuple[dict[str, Ragged], dict[str, float]]:
        """Compute fields to add to the batch, and metrics.

        Args:
            batch: with rollout_log_probs, old_log_probs and advantages.
            step: training step.
        """
        fields: dict[str, Ragged] = {}
        metrics: dict[str, float] = {}
        for part in self._parts:
            new_fields, new_metrics = part(batch, step)
            batch = replace(batch, **new_fields)
            fields |= new_fields
            metrics |= new_metrics
        return fields, metrics


def mismatch(batch: RolloutBatch, step: int) -> tuple[dict[str, Ragged], dict[str, float]]:
    """Compute metrics of the mismatch between trainer and sampler; no field."""
    assert batch.old_log_probs is not None
    fields = (batch.old_log_probs, batch.rollout_log_probs, batch.response_mask)
    chunks = row_chunks(batch.responses.lengths, *(field.values for field in fields))
    sums = [mismatch_sums(lengths, old - rollout, mask) for lengths, old, rollout, mask in chunks]
    found = mismatch_from(sums)
    return {}, {f"rollout/mismatch_{name}": value for name, value in found.items()}


class Correction:
    """Importance weights of trainer over sampler (loss_weights).

    Args:
        config: method, level and band.
    """

    def __init__(self, config: RolloutCorrectionConfig) -> None:
        self._config = config

    def __call__(
        self, batch: RolloutBatch, step: int
    ) -> tuple[dict[str, Ragged], dict[str, float]]:
        """Compute weights, their mean, and the share of clipped or masked tokens."""
        config, blocks = self._config, PaddedBlocks(batch.responses.lengths)
        weights, num_cut = [], 0
        assert batch.old_log_probs is not None
        fields = (batch.old_log_probs, batch.rollout_log_probs, batch.response_mask)
        padded = (blocks.of(field, 0.0) for field in fields)
        for old, rollout, mask in zip(*padded, strict=True):
            ratios = importance_ratios(old, rollout, mask, config.level)
            weights.append(correction_weights(ratios, mask, config.method, config.low, config.high))
            num_cut += int(((weights[-1] != ratios) & mask).count_nonzero())
        field = blocks.ragged(weights)
        sampled = on_mask(field.values, batch.response_mask.values)
        metrics = {
            "rollout/correction_weight_mean": float(sampled.mean()),
            "rollout/corrected_fraction": float(torch.tensor(float(num_cut)) / len(sampled)),
        }
        return {"loss_weights": field}, metrics


class Selection:
    """Tokens selected by the covariance of log-probability and advantage.

    Args:
        select: (covariances [N], mask [N], settings) -> bool [N].
        settings: of the policy loss.
        seed: of the run.
    """

    def __init__(
        self, select: Callable[..., Tensor], settings: dict[str, float], seed: int
    ) -> None:
        self._select = select
        self._settings = settings
        self._seed = seed

    def __call__(
        self, batch: RolloutBatch, step: int
    ) -> tuple[dict[str, Ragged], dict[str, float]]:
        """Select tokens among those that count; deterministic in run seed and step."""
        assert batch.old_log_probs is not None and batch.advantages is not None
        mask = batch.counted.values
        if not bool(mask.any()):
            return {"selected": batch.counted}, {"actor/covariance_max": 0.0}
        covariance = covariances(batch.old_log_probs.values, batch.advantages.values, mask)
        generator = torch.Generator().manual_seed(derive_seed(self._seed, "selected_tokens", step))
        chosen = self._select(covariance, mask, generator=generator, **self._settings)
        metrics = {"actor/covariance_max": float(covariance.max())}
        return {"selected": batch.responses.like(chosen)}, metrics
