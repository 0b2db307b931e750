"""What keeps the policy near the reference: a penalty in the reward, in the loss, or nothing.

Chosen once from config; the loop calls the same methods whichever it is.
"""

from functools import partial
from typing import Protocol

from hybridrl.algorithms.kl import adapt_coef, k3, kl_penalty_rewards
from hybridrl.algorithms.masked import masked_mean, on_mask
from hybridrl.config.algorithm_schema import KLConfig
from hybridrl.config.choices import KLPlacement
from hybridrl.controller.worker_group import Call, WorkerGroup
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.blocks import in_chunks
from hybridrl.data.ragged import Ragged


class KLControl(Protocol):
    """The reference's part in a step."""

    @property
    def loss_coef(self) -> float:
        """Weight of the penalty in the actor's loss."""
        ...

    def scores(self) -> dict[str, Call]:
        """The call that computes `ref_log_probs`, if there is a reference."""
        ...

    def rewards(self, batch: RolloutBatch) -> Ragged:
        """Per-token rewards: scores, less the penalty if it acts there."""
        ...

    def adapt(self, batch: RolloutBatch) -> dict[str, float | None]:
        """Metrics of the step's KL; moves an adaptive coefficient."""
        ...

    @property
    def coef(self) -> float | None:
        """Weight of the penalty in the next step, which is all that is remembered; None: none."""
        ...

    def restore(self, coef: float) -> None:
        """Go on with the weight that another run had reached."""
        ...


class NoReference:
    """kl.coef = 0: no reference is loaded, rewards are the scores."""

    @property
    def loss_coef(self) -> float:
        """No penalty."""
        return 0.0

    def scores(self) -> dict[str, Call]:
        """No call."""
        return {}

    def rewards(self, batch: RolloutBatch) -> Ragged:
        """The scores."""
        assert batch.scores is not None
        return batch.scores

    def adapt(self, batch: RolloutBatch) -> dict[str, float | None]:
        """No KL is known."""
        return {"actor/kl": None, "actor/kl_coef": None}

    @property
    def coef(self) -> float | None:
        """No penalty, no weight."""
        return None

    def restore(self, coef: float) -> None:
        """Nothing to restore."""


class KLPenalty:
    """KL against the frozen reference, with a fixed or adaptive coefficient.

    Args:
        config: placement, estimator and course of the coefficient.
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

    def scores(self) -> dict[str, Call]:
        """The call that computes `ref_log_probs`."""
        return {"ref_log_probs": Call(self._reference, "compute_log_probs")}

    def rewards(self, batch: RolloutBatch) -> Ragged:
        """Scores, less coef * KL(policy || reference) at each token if the penalty acts there."""
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
        """actor/kl in nats per token (k3, whose mean is never negative), and the coefficient."""
        assert batch.old_log_probs is not None and batch.ref_log_probs is not None
        mask = batch.response_mask.values
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
        """Weight of the penalty in the next step."""
        return self._coef

    def restore(self, coef: float) -> None:
        """Go on with the weight that another run had reached; a fixed one stays the config's."""
        if self._config.target is not None:
            self._coef = coef
