"""From token scores to the inputs of the losses.

Advantages           phase advantage, the three below one after the other
KLControl            scores -> rewards, less the KL penalty
AdvantageEstimator   rewards -> advantages, returns
LossInputs           importance weights against the sampler, and tokens that the loss selects
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from hybridrl.algorithms.advantages import GROUP_WISE, Estimate, as_estimate
from hybridrl.algorithms.covariance_losses import covariances
from hybridrl.algorithms.losses import adapt_coef, estimate_kl, kl_penalty_rewards
from hybridrl.algorithms.masked import check_finite, masked_mean, on_mask, whiten_parts
from hybridrl.algorithms.rollout_correction import (
    correction_weights,
    importance_ratios,
    mismatch_from,
    mismatch_sums,
)
from hybridrl.config.choices import CorrectionMethod, KLEstimator, KLPlacement
from hybridrl.config.estimators import TENSORS, estimator_of
from hybridrl.config.policy_losses import KEY, policy_loss_of
from hybridrl.config.schema import TeacherConfig
from hybridrl.config.sections import AlgorithmConfig, KLConfig, RolloutCorrectionConfig
from hybridrl.config.user_code.classes import locate
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.ragged import BLOCK_ELEMENTS, PaddedBlocks, Ragged, in_chunks, row_chunks
from hybridrl.data.schedule import ScheduledBatch
from hybridrl.data.seeds import derive_seed
from hybridrl.trainer.episodes.turn_rewards import by_turn, has_turn_rewards
from hybridrl.trainer.errors import RunStopped
from hybridrl.trainer.record import Row
from hybridrl.trainer.teaching import taught_advantages, teacher_metrics
from hybridrl.trainer.timing.phases import Phases

# A block size above that of any batch.
WHOLE = 2**62


class Advantages:
    """Advantages, returns and further inputs of the losses of a step."""

    def __init__(
        self,
        algorithm: AlgorithmConfig,
        teacher: TeacherConfig | None,
        seed: int,
        kl: "KLControl",
        phases: Phases,
    ) -> None:
        self._teacher = teacher
        self._kl = kl
        self._estimator = AdvantageEstimator(algorithm)
        self._loss_inputs = LossInputs(algorithm, seed)
        self._phases = phases

    def estimate(self, scheduled: ScheduledBatch, step: int) -> tuple[ScheduledBatch, Row]:
        """Compute rewards with KL penalty, then what losses take; return the batch and metrics."""
        of_teacher: Row = {}
        with self._phases.section("advantage"):
            rewards = self._kl.rewards(scheduled.batch)
            estimated = self._estimator.estimate(scheduled.batch, rewards)
            if self._teacher is not None:
                of_teacher = teacher_metrics(scheduled.batch, step)
                own = estimated["advantages"]
                estimated["advantages"] = taught_advantages(self._teacher, scheduled.batch, own)
            scheduled = scheduled.adding(**estimated)
            fields, metrics = self._loss_inputs.of_step(scheduled.batch, step)
            scheduled = scheduled.adding(**fields) if fields else scheduled
        values = value_metrics(scheduled.batch) if "values" in scheduled.batch.added else {}
        return scheduled, {**metrics, **of_teacher, **values}


class KLControl:
    """KL penalty against the frozen reference, with a fixed or adaptive coefficient.

    Attributes:
        coef: weight of the penalty in the next step, the only state; None without a penalty.
    """

    def __init__(self, config: KLConfig) -> None:
        self.coef = config.coef or None
        self._config = config

    @property
    def loss_coef(self) -> float:
        """Weight of the penalty in the actor's loss."""
        in_loss = self._config.placement is KLPlacement.loss
        return self.coef or 0.0 if in_loss else 0.0

    def rewards(self, batch: RolloutBatch) -> Ragged:
        """Compute per-token rewards: scores, minus coef * KL if the penalty is in the reward."""
        if self.coef is None or self._config.placement is KLPlacement.loss:
            return batch.scores
        penalised = partial(kl_penalty_rewards, coef=self.coef, estimator=self._config.estimator)
        fields = (batch.scores, batch.old_log_probs, batch.ref_log_probs)
        values = in_chunks(penalised, *(field.values for field in fields))
        # Off the mask are tokens that the policy has not sampled.
        return batch.scores.like(values.where(batch.response_mask.values, batch.scores.values))

    def adapt(self, batch: RolloutBatch) -> dict[str, float | None]:
        """Compute actor/kl in nats per token (k3, mean >= 0); update an adaptive coefficient."""
        used = self.coef
        if used is None:
            return {"actor/kl": None, "actor/kl_coef": None}
        mask, num_responses = batch.response_mask.values, len(batch.last_of_episodes)
        k3 = partial(estimate_kl, estimator=KLEstimator.k3)
        per_token = in_chunks(k3, batch.old_log_probs.values, batch.ref_log_probs.values)
        if self._config.target is not None:
            self.coef = adapt_coef(
                used,
                current=float(on_mask(per_token, mask).sum()) / num_responses,
                target=self._config.target,
                horizon=self._config.horizon,
                num_responses=num_responses,
            )
        return {"actor/kl": float(masked_mean(per_token, mask)), "actor/kl_coef": used}

    def restore(self, coef: float | None) -> None:
        """Restore an adaptive weight; a fixed one is the config's."""
        if self.coef is not None and self._config.target is not None:
            self.coef = coef or self.coef


class AdvantageEstimator:
    """Advantage estimator that `algorithm.advantage` names.

    A group-wise function (algorithms/advantages.py) runs on blocks of the batch. Any other
    function runs on the whole batch, padded.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        estimator = estimator_of(config.advantage)
        self._name = config.advantage
        function = locate("algorithm.advantage", estimator.path)
        self._is_group_wise = GROUP_WISE in vars(function)
        self._function = vars(function)[GROUP_WISE] if self._is_group_wise else function
        self._compares_groups = estimator.compares_groups
        self._tensors = [name for name in estimator.takes if name in TENSORS]
        settings = vars(config)
        self._settings = {name: settings[name] for name in estimator.takes if name in settings}
        self._whiten = config.whiten_advantages or self._function is not function

    def estimate(self, batch: RolloutBatch, rewards: Ragged) -> dict[str, Ragged]:
        """Estimate `advantages` and, with a critic, `returns`.

        The responses of an episode count as one, so that group baselines are by episode, also where
        turns with rewards are compared.
        Advantages are whitened over the tokens that count in the policy loss, if there are any.

        Args:
            batch: with its loss mask, and with values if the estimator needs them.
            rewards: per token, after the KL penalty.

        Raises:
            ValueError: the estimator rejects its input.
            WrongReturn: it returned no advantages.
            RunStopped: an input or advantage is NaN or infinite, or the estimator is not defined
                for rewards of turns, which the batch has.
        """
        lengths, several = batch.responses.lengths, batch.episode is not None
        batch = batch.by_episode()
        rewards = batch.responses.like(rewards.values)
        more: dict[str, Tensor] = {}
        if self._compares_groups and has_turn_rewards(batch):
            batch, rewards, more["shares"] = by_turn(self._name, batch, rewards, lengths)
        blocks = PaddedBlocks(
            batch.responses.lengths,
            batch.group_id if self._compares_groups else None,
            BLOCK_ELEMENTS if self._is_group_wise else WHOLE,
        )
        known = batch.tensors() | {"rewards": rewards, "loss_mask": batch.counted} | more
        taken = [*self._tensors, *more]
        inputs = {name: known[name] for name in (*taken, "response_mask")}
        if several:
            # An episode's reward counts even if no token is the policy's.
            mask = batch.response_mask.values.clone()
            mask[batch.last_sampled] = True
            inputs["response_mask"] = batch.response_mask.like(mask)
        _check_finite(self._name, batch.response_mask, inputs)
        estimates = list(self._by_block(blocks, inputs, taken))
        advantages = [estimate.advantages for estimate in estimates]
        if not all(bool(block.sum().isfinite()) for block in advantages):
            wrong = {"advantages": blocks.ragged(advantages)}
            _check_finite(f"the policy loss after {self._name}", batch.response_mask, wrong)
        if self._whiten and bool(batch.counted.values.any()):
            advantages = whiten_parts(advantages, list(blocks.of(batch.counted, False)))
        returns = [estimate.returns for estimate in estimates if estimate.returns is not None]
        fields = {"advantages": advantages} | ({"returns": returns} if returns else {})
        return {name: Ragged(blocks.ragged(x).values, lengths) for name, x in fields.items()}

    def _by_block(
        self, blocks: PaddedBlocks, inputs: Mapping[str, Ragged | Tensor], names: Sequence[str]
    ) -> Iterator[Estimate]:
        padded = [
            blocks.of(value, 0.0) if isinstance(value, Ragged) else [value[k] for k in blocks.rows]
            for value in inputs.values()
        ]
        for tensors in zip(*padded, strict=True):
            named = dict(zip(inputs, tensors, strict=True))
            taken = {name: named[name] for name in names}
            estimate = self._function(**taken, **self._settings)
            yield as_estimate(estimate, self._name, named["response_mask"], named.get("values"))


def _check_finite(function: str, mask: Ragged, fields: Mapping[str, Ragged | Tensor]) -> None:
    """Raise RunStopped if a field is NaN or infinite on the mask; it names the place."""
    for name, field in fields.items():
        if isinstance(field, Ragged) and not bool(field.values.sum().isfinite()):
            try:
                check_finite(function, mask.pad(False), **{name: field.pad(0.0)})
            except ValueError as error:
                raise RunStopped(str(error)) from error


def value_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Compute critic/value_mean and critic/return_mean over the response tokens."""
    mask = batch.response_mask.values
    return {
        "critic/value_mean": float(on_mask(batch.values.values, mask).mean()),
        "critic/return_mean": float(on_mask(batch.returns.values, mask).mean()),
    }


class LossInputs:
    """Fields that the run's policy loss needs, beside log-probs and advantages."""

    def __init__(self, config: AlgorithmConfig, seed: int) -> None:
        loss, correction = policy_loss_of(config.loss.function), config.rollout_correction
        corrects = correction.method is not CorrectionMethod.none and not loss.is_against_rollout
        self._correction = correction if corrects else None
        self._select = None
        if loss.selection is not None:
            settings = {name: config.loss.args[name] for name in loss.selection_settings}
            self._select = partial(locate(f"{KEY}.function", loss.selection), **settings)
        self._seed = seed

    def of_step(self, batch: RolloutBatch, step: int) -> tuple[dict[str, Ragged], dict[str, float]]:
        """Compute fields to add to the batch, and metrics.

        Returns:
            loss_weights: importance weights of trainer over sampler. selected: tokens chosen by
            the covariance of log-probability and advantage; deterministic in run seed and step.
        """
        fields: dict[str, Ragged] = {}
        metrics = mismatch(batch)
        if self._correction is not None:
            fields["loss_weights"], of_weights = importance_weights(batch, self._correction)
            metrics |= of_weights
        if self._select is not None:
            seed = derive_seed(self._seed, "selected_tokens", step)
            draw = partial(self._select, generator=torch.Generator().manual_seed(seed))
            fields["selected"], metrics["actor/covariance_max"] = _selected(batch, draw)
        return fields, metrics


def mismatch(batch: RolloutBatch) -> dict[str, float]:
    """Compute metrics of the mismatch between trainer and sampler."""
    fields = (batch.old_log_probs, batch.rollout_log_probs, batch.response_mask)
    chunks = row_chunks(batch.responses.lengths, *(field.values for field in fields))
    sums = [mismatch_sums(lengths, old - rollout, mask) for lengths, old, rollout, mask in chunks]
    return {f"rollout/mismatch_{name}": value for name, value in mismatch_from(sums).items()}


def importance_weights(
    batch: RolloutBatch, config: RolloutCorrectionConfig
) -> tuple[Ragged, dict[str, float]]:
    """Compute importance weights, their mean, and the share of clipped or masked tokens."""
    blocks = PaddedBlocks(batch.responses.lengths)
    weights, num_cut = [], 0
    fields = (batch.old_log_probs, batch.rollout_log_probs, batch.response_mask)
    padded = (blocks.of(field, 0.0) for field in fields)
    for old, rollout, mask in zip(*padded, strict=True):
        ratios = importance_ratios(old, rollout, mask, config.level)
        weights.append(correction_weights(ratios, mask, config.method, config.low, config.high))
        num_cut += int(((weights[-1] != ratios) & mask).count_nonzero())
    field = blocks.ragged(weights)
    sampled = on_mask(field.values, batch.response_mask.values)
    return field, {
        "rollout/correction_weight_mean": float(sampled.mean()),
        "rollout/corrected_fraction": float(torch.tensor(float(num_cut)) / len(sampled)),
    }


def _selected(batch: RolloutBatch, select: partial[Tensor]) -> tuple[Ragged, float]:
    """Select tokens among those that count; return them and the largest covariance."""
    mask = batch.counted.values
    if not bool(mask.any()):
        return batch.counted, 0.0
    covariance = covariances(batch.old_log_probs.values, batch.advantages.values, mask)
    return batch.responses.like(select(covariance, mask)), float(covariance.max())
