"""KL penalty against the reference, in the reward or in the loss; a null object without one."""

from functools import partial

from hybridrl.algorithms.kl import adapt_coef, estimate_kl, kl_penalty_rewards
from hybridrl.algorithms.masked import masked_mean, on_mask
from hybridrl.config.algorithm_schema import KLConfig
from hybridrl.config.choices import KLEstimator, KLPlacement
from hybridrl.controller.worker_group import Call, WorkerGroup
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.blocks import in_chunks
from hybridrl.data.ragged import Ragged


class NoReference:
    """Null object for kl.coef = 0: no reference is loaded, rewards are the scores."""

    @property
    def loss_coef(self) -> float:
        """Weight of 0."""
        return 0.0

    def forward_calls(self) -> dict[str, Call]:
        """Return no call."""
        return {}

    def rewards(self, batch: RolloutBatch) -> Ragged:
        """Return the scores."""
        assert batch.scores is not None
        return batch.scores

    def adapt(self, batch: RolloutBatch) -> dict[str, float | None]:
        """Return metrics of unknown value."""
        return {"actor/kl": None, "actor/kl_coef": None}

    @property
    def coef(self) -> float | None:
        """No weight."""
        return None

    def restore(self, coef: float) -> None:
        """Restore nothing."""


class KLPenalty:
    """KL against the frozen reference, with a fixed or adaptive coefficient.

    Args:
        config: placement, estimator and coefficient.
        reference: the worker group that computes ref_log_probs.
    """

    def __init__(self, config: KLConfig, reference: WorkerGroup) -> None:
        self._config = config
        self._reference = reference
        self._coef = config.coef

    @property
    def loss_coef(self) -> float:
        """Weight of the penalty in the actor's loss."""
        return self._coef if self._config.placement is KLPlacement.loss else 0.0

    def forward_calls(self) -> dict[str, Call]:
        """Return the call that computes `ref_log_probs`."""
        return {"ref_log_probs": Call(self._reference, "compute_log_probs")}

    def rewards(self, batch: RolloutBatch) -> Ragged:
        """Compute per-token rewards: scores, minus coef * KL if the penalty is in the reward."""
        assert batch.scores is not None
        if self._config.placement is KLPlacement.loss:
            return batch.scores
        assert batch.old_log_probs is not None and batch.ref_log_probs is not None
        rewards = in_chunks(
            partial(kl_penalty_rewards, coef=self._coef, estimator=self._config.estimator),
            batch.scores.values,
            batch.old_log_probs.values,
            batch.ref_log_probs.values,
        )
        return batch.scores.like(rewards)

    def adapt(self, batch: RolloutBatch) -> dict[str, float | None]:
        """Compute actor/kl in nats per token (k3, mean >= 0); update an adaptive coefficient."""
        assert batch.old_log_probs is not None and batch.ref_log_probs is not None
        mask = batch.response_mask.values
        k3 = partial(estimate_kl, estimator=KLEstimator.k3)
        per_token = in_chunks(k3, batch.old_log_probs.values, batch.ref_log_probs.values)
        used = self._coef
        if self._config.target is not None:
            self._coef = adapt_coef(
                used,
                current=float(on_mask(per_token, mask).sum()) / len(batch),
                target=self._config.target,
                horizon=self._config.horizon,
                num_responses=len(batch),
            )
        return {"actor/kl": float(masked_mean(per_token, mask)), "actor/kl_coef": used}

    @property
    def coef(self) -> float | None:
        """Weight of the penalty in the next step, the only state."""
        return self._coef

    def restore(self, coef: float) -> None:
        """Restore an adaptive weight; a fixed one is the config's."""
        if self._config.target is not None:
            self._coef = coef


KLControl = NoReference | KLPenalty
