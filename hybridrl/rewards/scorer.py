"""Scorer of responses: failures of the reward function are counted and do not stop the run."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from hybridrl.config.user_code.classes import check_reward_function
from hybridrl.rewards.base import RewardItem, read_score, resolve_function
from hybridrl.rewards.messages import FailureKind, ItemResult, Setup
from hybridrl.rewards.pool import TaskPool

TASK = "hybridrl.rewards.base.reward_task"


@dataclass(frozen=True, slots=True)
class Failure:
    """Item whose reward failed.

    Attributes:
        index: of the item in the batch.
        kind: error (exception, not a finite number, process died) or timeout.
        reason: one line.
        traceback: of the exception; empty if the process was killed or died.
    """

    index: int
    kind: FailureKind
    reason: str
    traceback: str


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


class RewardScorer:
    """Scorer that runs one reward function in a `TaskPool`.

    Use it as a context manager or call `close`.

    Args:
        function: dotted path of a function (prompt, response, example, **args) -> float.
        args: keyword arguments for every call.
        timeout_s: wall time limit of one item.
        num_processes: None: one per core that this process may use, at most 8.
        failed_score: score of a failed item.

    Raises:
        ConfigError: there is no such function, its signature does not fit these arguments, or
            timeout_s or num_processes is not positive.
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
        resolve_function(function)
        check_reward_function("reward", function, args)
        self._failed_score = failed_score
        read = partial(read_score, function=function)
        self._pool = TaskPool(Setup(TASK, function, args, timeout_s), num_processes, "reward", read)

    def score(self, items: Sequence[RewardItem]) -> ScoreResult:
        """Compute the reward of each (prompt, response, example); failures are never raised.

        Raises:
            RewardProcessError: processes do not start up.
        """
        answers = self._pool.run(items)
        scores = [self._failed_score if a.kind else a.value.total for a in answers]
        return ScoreResult(scores, failures_of(answers), _parts(answers))

    def close(self) -> None:
        """End all processes and those they started. A second call does nothing."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def failures_of(answers: Sequence[ItemResult]) -> list[Failure]:
    """Return the failed items."""
    return [
        Failure(answer.index, answer.kind, answer.reason, answer.traceback)
        for answer in answers
        if answer.kind
    ]


def _parts(answers: Sequence[ItemResult]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for answer in answers:
        for name, value in ({} if answer.kind else answer.value.parts).items():
            found.setdefault(name, []).append(value)
    return found
