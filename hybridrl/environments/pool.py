"""Pool of environments: many conversations in separate processes, with a time limit."""

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
from hybridrl.rewards.messages import FailureKind, ItemResult, Setup
from hybridrl.rewards.pool import TaskPool

TASK = "hybridrl.environments.base.environment_task"


@dataclass(frozen=True)
class EnvironmentReply:
    """Reply of an environment, or its failure.

    Attributes:
        state: pickled environment (StepResponse.state).
        result: answer; after a failure, an empty one that ends the conversation.
        failure: kind of failure, or None.
        reason: reason of the failure in one line, or empty.
    """

    state: str
    result: StepResult
    failure: FailureKind | None = None
    reason: str = ""


class EnvironmentPool:
    """Processes that run environments, started in the background; a context manager.

    Args:
        function: dotted path of the class or function that creates environments.
        args: its keyword arguments.
        timeout_s: maximum wall seconds of one answer.
        num_processes: number of processes; None: one per available core, at most 8.

    Raises:
        ConfigError: no such class or function.
    """

    def __init__(
        self, function: str, args: dict[str, Any], *, timeout_s: float, num_processes: int | None
    ) -> None:
        resolve_environment(function)
        setup = Setup(TASK, function, args, timeout_s)
        read = partial(parse_response, function=function)
        self._pool = TaskPool(setup, num_processes, "environment", read)

    def open(self, examples: Sequence[dict[str, Any]]) -> list[EnvironmentReply]:
        """Create an environment for each example; return the initial replies."""
        return [_reply(answer) for answer in self._pool.run(list(map(ResetRequest, examples)))]

    def step(self, turns: Sequence[StepRequest]) -> list[EnvironmentReply]:
        """Answer one turn of each of several conversations, in order."""
        return [_reply(answer) for answer in self._pool.run(turns)]

    def close(self) -> None:
        """End all processes. A second call does nothing."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _reply(answer: ItemResult) -> EnvironmentReply:
    if answer.kind is not None:
        return EnvironmentReply("", StepResult("", 0.0, True), answer.kind, answer.reason)
    return EnvironmentReply(*answer.value)
