"""Scorer of responses: failures of the reward function are counted and do not stop the run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

from hybridrl.config.choices import RewardSignature
from hybridrl.rewards.base import RewardItem, Score, read_score
from hybridrl.rewards.calls import reward_call
from hybridrl.rewards.processes.messages import Failure, FailureKind, Setup
from hybridrl.rewards.processes.pool import TaskPool

TASK = "hybridrl.rewards.calls.reward_task"


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

    A TRL function gets all responses to one prompt in one call. If that fails, each is computed
    in a call of its own, so that only the guilty one fails.

    Args:
        function: dotted path of a function (prompt, response, example, **args) -> float, or with
            verl's or TRL's signature.
        args: keyword arguments for every call.
        timeout_s: wall time limit of one call.
        num_processes: as in `TaskPool`.
        failed_score: score of a failed item.
        concurrency: calls under way over all processes if the function is async.
        signature: auto: by the function's parameter names.

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
        concurrency: int = 1,
        signature: RewardSignature = RewardSignature.auto,
    ) -> None:
        found = reward_call("reward", function, args, signature).signature
        self._is_batched = found is RewardSignature.trl
        self._function = function
        self._failed_score = failed_score
        setup = Setup(TASK, function, args, timeout_s, concurrency, {"signature": found})
        read = partial(read_score, function=function)
        super().__init__(
            setup, num_processes, "reward", partial(_read_all, read) if self._is_batched else read
        )

    def score(self, items: Sequence[RewardItem]) -> ScoreResult:
        """Compute the reward of each (prompt, response, example); failures are never raised.

        Raises:
            RewardProcessError: processes do not start up.
        """
        result = ScoreResult([], [])
        found = self._by_prompt(items) if self._is_batched else self.run([i[:3] for i in items])
        for score in found:
            if isinstance(score, Failure):
                result.scores.append(self._failed_score)
                result.failures.append(score)
                continue
            result.scores.append(score.total)
            for name, value in score.parts.items():
                result.parts.setdefault(name, []).append(value)
        return result

    def _by_prompt(self, items: Sequence[RewardItem]) -> list[Score | Failure]:
        """Compute the responses to each prompt together; those of failed calls again, alone."""
        found: dict[int, Score | Failure] = {}
        groups = [list(rows) for _, rows in groupby(range(len(items)), lambda row: items[row][0])]
        while groups:
            alone = []
            values = self.run([[items[row] for row in rows] for rows in groups])
            for rows, value in zip(groups, values, strict=True):
                if isinstance(value, list) and len(value) == len(rows):
                    scores = map(self._score_of, rows, value)
                    found.update(zip(rows, scores, strict=True))
                elif len(rows) > 1:
                    alone += [[row] for row in rows]
                else:
                    found[rows[0]] = self._score_of(rows[0], value)
            groups = alone
        return [found[row] for row in range(len(items))]

    def _score_of(self, row: int, found: Any) -> Score | Failure:
        """Return the score or failure of a row; anything else is a failure, too."""
        match found:
            case Score():
                return found
            case Failure():
                return replace(found, index=row)
        return Failure(row, FailureKind.error, f"{self._function} returned None for it")


def _read_all(read: Callable[[Any], Score], values: Any) -> list[Score | None]:
    """Read the scores of a TRL function; raise a ValueError or TypeError if they are none."""
    if not isinstance(values, list):
        raise ValueError("no list of scores")
    return [None if value is None else read(value) for value in values]
