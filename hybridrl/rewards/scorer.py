"""Scorer of responses: failures of the reward function are counted and do not stop the run."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hybridrl.config.user_code.classes import check_reward_function
from hybridrl.rewards.base import RewardItem, read_score
from hybridrl.rewards.processes.messages import Failure, Setup
from hybridrl.rewards.processes.pool import TaskPool

TASK = "hybridrl.rewards.base.reward_task"


@dataclass(frozen=True)
class ScoreResult:
    """Scores of a batch, in the order of its items.

    Attributes:
        scores: one per item; `failed_score` for failed items.
        failures: failed items in order of index.
        parts: by name, values of the items that have such a part.
    """

    scores: list[float]
    failures: list[Failure]
    parts: dict[str, list[float]] = field(default_factory=dict)


class RewardScorer(TaskPool):
    """Pool of processes that run one reward function.

    Args:
        function: dotted path of a function (prompt, response, example, **args) -> float.
        args: keyword arguments for every call.
        timeout_s: wall time limit of one item.
        num_processes: as in `TaskPool`.
        failed_score: score of a failed item.

    Raises:
        ConfigError: there is no such function, or its signature does not fit these arguments.
    """

    def __init__(
        self,
        function: str,
        args: dict[str, Any],
        *,
        timeout_s: float,
        num_processes: int | None,
        failed_score: float,
    ) -> None:
        check_reward_function("reward", function, args)
        self._failed_score = failed_score
        read = partial(read_score, function=function)
        super().__init__(Setup(TASK, function, args, timeout_s), num_processes, "reward", read)

    def score(self, items: Sequence[RewardItem]) -> ScoreResult:
        """Compute the reward of each (prompt, response, example); failures are never raised.

        Raises:
            RewardProcessError: processes do not start up.
        """
        result = ScoreResult([], [])
        for found in self.run(items):
            if isinstance(found, Failure):
                result.scores.append(self._failed_score)
                result.failures.append(found)
                continue
            result.scores.append(found.total)
            for name, value in found.parts.items():
                result.parts.setdefault(name, []).append(value)
        return result
