"""The environment of a run: its processes, its rewards, its failures and its stop strings."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from hybridrl.config.errors import raised_problems
from hybridrl.config.schema import EnvironmentConfig, ModelConfig
from hybridrl.controller.worker_group import WorkerGroup
from hybridrl.data.batch import PromptBatch, RolloutBatch
from hybridrl.data.sources.prompts import Prompt
from hybridrl.data.sources.tokenizer import NO_OPTIONS, Decode, TurnTokens, load_tokenizer
from hybridrl.models.end_tokens import stop_token_ids
from hybridrl.models.resolve import plain_folder
from hybridrl.rewards.processes.messages import Failure, FailureKind
from hybridrl.trainer.episodes.base import Episodes
from hybridrl.trainer.rewarding import Rewarded

# Distinct reasons of failures that are kept; an unbounded number could be one per conversation.
MAX_REASONS = 1000
MANY = "for one of many reasons; the log has the first of them"


class FailureReasons:
    """Numbered reasons of environment failures since the run began.

    RolloutBatch.environment_failures holds one number per response, 0 for no failure.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[FailureKind, str], int] = {}

    def number(self, kind: FailureKind, reason: str) -> int:
        """Return the number of a reason, a new one for a new reason."""
        if (kind, reason) not in self._numbers and len(self._numbers) >= MAX_REASONS:
            reason = MANY
        return self._numbers.setdefault((kind, reason), len(self._numbers) + 1)

    def look_up(self, number: int) -> tuple[FailureKind, str]:
        """Return the kind and reason of a number above 0."""
        return list(self._numbers)[number - 1]


@dataclass(frozen=True)
class Environment:
    """Environment or agent of a run, whose processes are running.

    Attributes:
        episodes: opens its episodes on the engines; what they open ends with the stack.
        failures: those that generation met in them.
        engines: chooses the engine of each prompt among a number of them.
    """

    episodes: Callable[[WorkerGroup, Decode, ExitStack], Episodes]
    failures: FailureReasons
    engines: Callable[[PromptBatch, int], list[int]]


class EnvironmentRewards:
    """Rewards that responses earned from an environment while they were generated.

    Generation fills `failures`. A response whose environment failed has `failed_score`.
    """

    def __init__(self, decode: Decode, failures: FailureReasons, failed_score: float) -> None:
        self._decode = decode
        self._failures = failures
        self._failed_score = failed_score

    def score(self, prompts: list[Prompt], batch: RolloutBatch) -> Rewarded:
        """Return each conversation's text and its sum of rewards."""
        assert batch.environment_rewards is not None and batch.environment_failures is not None
        failures = [
            Failure(index, *self._failures.look_up(number), traceback="")
            for index, number in enumerate(batch.environment_failures.tolist())
            if number
        ]
        scores = batch.environment_rewards.tolist()
        for failure in failures:
            scores[failure.index] = self._failed_score
        texts = self._decode(row.tolist() for row in batch.responses.rows())
        return Rewarded(texts, scores, failures)


def turn_tokens(
    model: ModelConfig, config: EnvironmentConfig, options: Mapping[str, Any] = NO_OPTIONS
) -> TurnTokens:
    """Return the turn encoder of a model, with the stop strings of the config.

    `options` are further arguments of the chat template.

    Raises:
        ConfigError: there is no such model, or a stop string is not one token of it.
    """
    ends = stop_token_ids(plain_folder(model.path))
    return TurnTokens(load_tokenizer(model), ends, config.stop, config.role, options)


def stop_problems(model: ModelConfig, config: EnvironmentConfig) -> list[str]:
    """Return the problems of environment.stop with a model."""
    return raised_problems(turn_tokens, model, config)
