"""The reward model's part in a step: scores that are added to the reward function's, or nothing.

Chosen once from config; the loop asks for the same things whichever it is.
"""

from dataclasses import replace
from typing import Protocol

from hybridrl.config.schema import RunConfig
from hybridrl.controller.worker_group import Call, WorkerGroup, Workers
from hybridrl.data.ragged import Ragged
from hybridrl.trainer.rewarding import Rewarded

# Of the call that scores, in timings and results.
SCORES = "model_scores"


class RewardModel(Protocol):
    """The reward model's part in a step."""

    def scores(self) -> dict[str, Call]:
        """The call that scores responses, if there is a reward model."""
        ...

    def added(
        self, rewarded: Rewarded, found: dict[str, Ragged]
    ) -> tuple[Rewarded, dict[str, float]]:
        """Rewards with the model's scores in them, and what is known of these.

        Args:
            rewarded: what the reward function said.
            found: what the workers computed, by the names of calls; the model's scores are taken
                out of it.
        """
        ...


class NoRewardModel:
    """The reward function alone decides."""

    def scores(self) -> dict[str, Call]:
        """No call."""
        return {}

    def added(
        self, rewarded: Rewarded, found: dict[str, Ragged]
    ) -> tuple[Rewarded, dict[str, float]]:
        """The rewards as they are."""
        return rewarded, {}


class WeightedRewardModel:
    """A reward model whose scores count with a weight.

    Args:
        group: the worker group that holds it.
        weight: what each score is multiplied with.
    """

    def __init__(self, group: WorkerGroup, weight: float) -> None:
        self._group = group
        self._weight = weight

    def scores(self) -> dict[str, Call]:
        """The call that scores responses."""
        return {SCORES: Call(self._group, "compute_scores")}

    def added(
        self, rewarded: Rewarded, found: dict[str, Ragged]
    ) -> tuple[Rewarded, dict[str, float]]:
        """score + weight * model score of each response; reward/model_mean, unweighted.

        Raises:
            ValueError: the model gave a score that is NaN or infinite.
        """
        per_token = found.pop(SCORES)
        scores = per_token.values[per_token.lengths.cumsum(0) - 1].double()
        wrong = int((~scores.isfinite()).sum())
        if wrong:
            raise ValueError(
                f"the reward model scored {wrong} of {len(scores)} responses NaN or infinite; "
                f"try fsdp.param_dtype=float32, or another checkpoint"
            )
        pairs = zip(rewarded.scores, scores.tolist(), strict=True)
        total = [score + self._weight * more for score, more in pairs]
        return replace(rewarded, scores=total), {"reward/model_mean": float(scores.mean())}


def reward_model_for(config: RunConfig, workers: Workers) -> RewardModel:
    """The part that conf/reward_model asks for."""
    if workers.reward_model is None:
        return NoRewardModel()
    return WeightedRewardModel(workers.reward_model, config.reward_model.weight)
