"""Reward model: scores that are added to those of the reward function; or a null object."""

from dataclasses import replace

from hybridrl.config.schema import RunConfig
from hybridrl.controller.worker_group import Call, WorkerGroup, Workers
from hybridrl.data.ragged import Ragged
from hybridrl.trainer.rewarding import Rewarded

# Name of the call in timings and results.
SCORES = "model_scores"


class NoRewardModel:
    """Null object for a run without a reward model."""

    def forward_calls(self) -> dict[str, Call]:
        """Return no call."""
        return {}

    def added(
        self, rewarded: Rewarded, found: dict[str, Ragged]
    ) -> tuple[Rewarded, dict[str, float]]:
        """Return the rewards unchanged."""
        return rewarded, {}


class WeightedRewardModel:
    """Reward model with a weight.

    Args:
        group: the worker group that holds it.
        weight: factor of each score.
    """

    def __init__(self, group: WorkerGroup, weight: float) -> None:
        self._group = group
        self._weight = weight

    def forward_calls(self) -> dict[str, Call]:
        """Return the call that scores responses."""
        return {SCORES: Call(self._group, "compute_scores")}

    def added(
        self, rewarded: Rewarded, found: dict[str, Ragged]
    ) -> tuple[Rewarded, dict[str, float]]:
        """Compute score + weight * model score; reward/model_mean is unweighted.

        Args:
            rewarded: by the reward function.
            found: results of the forward calls, by name; the model's scores are removed.

        Raises:
            ValueError: a score of the model is NaN or infinite.
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


RewardModel = NoRewardModel | WeightedRewardModel


def reward_model_for(config: RunConfig, workers: Workers) -> RewardModel:
    """Build the reward model of conf/reward_model."""
    if workers.reward_model is None:
        return NoRewardModel()
    return WeightedRewardModel(workers.reward_model, config.reward_model.weight)
