"""Environments of many conversations, stepped in processes with a time limit."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from hybridrl.environments.base import (
    ResetRequest,
    StepRequest,
    StepResult,
    parse_response,
    resolve_environment,
)
from hybridrl.rewards.messages import Answer, FailureKind, Setup
from hybridrl.rewards.pool import TaskPool

TASK = "hybridrl.environments.base.environment_task"


@dataclass(frozen=True)
class EnvironmentReply:
    """What an environment answered.

    Attributes:
        state: the environment as it is now (StepResponse.state).
        result: its answer; of one that failed, nothing, and the conversation is over.
        failure: of which kind; None if it did not fail.
        reason: why it failed, in one line; empty if it did not.
    """

    state: str
    result: StepResult
    failure: FailureKind | None = None
    reason: str = ""


class EnvironmentPool:
    """A pool of processes that step environments. They start in the background.

    Use it as a context manager or call `close`.

    Args:
        function: dotted path of the class or function that makes environments.
        args: its keyword arguments.
        timeout_s: seconds of wall time that one answer may take.
        num_processes: None: one per core that this process may use, at most 8.

    Raises:
        ConfigError: there is no such class or function.
    """

    def __init__(
        self, function: str, args: dict[str, Any], *, timeout_s: float, num_processes: int | None
    ) -> None:
        resolve_environment(function)
        setup = Setup(TASK, function, args, timeout_s)
        read = partial(parse_response, function=function)
        self._pool = TaskPool(setup, num_processes, "environment", read)

    def open(self, examples: Sequence[dict[str, Any]]) -> list[EnvironmentReply]:
        """A new environment for each example, and the text it begins with."""
        return [_reply(answer) for answer in self._pool.run(list(map(ResetRequest, examples)))]

    def step(self, turns: Sequence[StepRequest]) -> list[EnvironmentReply]:
        """The answers to turns of as many conversations, in order."""
        return [_reply(answer) for answer in self._pool.run(turns)]

    def close(self) -> None:
        """End all processes. A second call does nothing."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _reply(answer: Answer) -> EnvironmentReply:
    if answer.kind is not None:
        return EnvironmentReply("", StepResult("", 0.0, True), answer.kind, answer.reason)
    return EnvironmentReply(*answer.value)
