"""Scorer of responses: failures of the reward function are counted and do not stop the run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

from hybridrl.config.choices import RewardSignature
from hybridrl.config.sections import FunctionConfig, RewardConfig
from hybridrl.config.user_code.signatures import CallsOthers
from hybridrl.processes.messages import Failure, FailureKind, Setup
from hybridrl.processes.pool import TaskPool
from hybridrl.rewards.base import RewardItem, Score, read_score
from hybridrl.rewards.calls import reward_call

TASK = "hybridrl.rewards.calls.reward_task"


@dataclass(frozen=True)
class ScoreResult:
    """Scores of a batch, in the order of its items.

    Attributes:
        scores: one per item; `failed_score` for failed items.
        failures: failed items in order of index.
        parts: by name, values of the items that have such a part.
        item_parts: the parts of each item; {} if it failed or has none.
    """

    scores: list[float]
    failures: list[Failure]
    parts: dict[str, list[float]] = field(default_factory=dict)
    item_parts: list[dict[str, float]] = field(default_factory=list, compare=False)


def rule_config(reward: RewardConfig, rule: FunctionConfig) -> RewardConfig:
    """Return the config of an evaluation rule: limits of the run's reward, and one process."""
    return replace(
        reward,
        function=rule.function,
        args=rule.args,
        signature=RewardSignature.auto,
        num_processes=1,
        failed_score=0.0,
    )


class RewardScorer(TaskPool):
    """Pool of processes that run one reward function.

    A TRL function gets all responses to one prompt in one call. If that fails, each is computed
    in a call of its own, so that only the guilty one fails.

    Raises:
        ConfigError: there is no such function, or its signature does not fit these arguments.
    """

    def __init__(self, config: RewardConfig) -> None:
        function, args = config.function, config.args
        call = reward_call("reward", function, args, config.signature)
        self._is_batched = call.signature is RewardSignature.trl
        self._num_fields = 4 if isinstance(call.function, CallsOthers) else 3
        self._config = config
        options = {"signature": call.signature}
        setup = Setup(TASK, function, args, config.timeout_s, config.concurrency, options)
        read = partial(read_score, function=function)
        decode = partial(_read_all, read) if self._is_batched else read
        super().__init__(setup, config.num_processes, "reward", decode)

    def score(self, items: Sequence[RewardItem]) -> ScoreResult:
        """Compute the reward of each (prompt, response, example); failures are never raised.

        Raises:
            ProcessesError: processes do not start up.
        """
        result = ScoreResult([], [])
        if self._is_batched:
            scores = self._by_prompt(items)
        else:
            scores = self.run([item[: self._num_fields] for item in items])
        for score in scores:
            if isinstance(score, Failure):
                result.scores.append(self._config.failed_score)
                result.failures.append(score)
                result.item_parts.append({})
                continue
            result.scores.append(score.total)
            result.item_parts.append(dict(score.parts))
            for name, value in score.parts.items():
                result.parts.setdefault(name, []).append(value)
        return result

    def _by_prompt(self, items: Sequence[RewardItem]) -> list[Score | Failure]:
        """Compute the responses to each prompt together; those of failed calls again, alone."""
        by_row: dict[int, Score | Failure] = {}
        groups = [list(rows) for _, rows in groupby(range(len(items)), lambda row: items[row][0])]
        while groups:
            alone = []
            values = self.run([[items[row] for row in rows] for rows in groups])
            for rows, value in zip(groups, values, strict=True):
                if isinstance(value, list) and len(value) == len(rows):
                    scores = map(self._score_of, rows, value)
                    by_row.update(zip(rows, scores, strict=True))
                elif len(rows) > 1:
                    alone += [[row] for row in rows]
                else:
                    by_row[rows[0]] = self._score_of(rows[0], value)
            groups = alone
        return [by_row[row] for row in range(len(items))]

    def _score_of(self, row: int, score: Any) -> Score | Failure:
        """Return the score or failure of a row; anything else is a failure, too."""
        match score:
            case Score():
                return score
            case Failure():
                return replace(score, index=row)
        return Failure(row, FailureKind.error, f"{self._config.function} returned None for it")


def _read_all(read: Callable[[Any], Score], values: Any) -> list[Score | None]:
    """Read the scores of a TRL function; raise a ValueError or TypeError if they are none."""
    if not isinstance(values, list):
        raise ValueError("no list of scores")
    return [None if value is None else read(value) for value in values]
