"""Pool of environments: many conversations in separate processes, with a time limit."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from hybridrl.environments.base import (
    EnvironmentReply,
    StepRequest,
    StepResult,
    read_reply,
    resolve_environment,
)
from hybridrl.rewards.processes.messages import Failure, Setup
from hybridrl.rewards.processes.pool import TaskPool

TASK = "hybridrl.environments.base.environment_task"


class EnvironmentPool(TaskPool):
    """Pool of processes that run environments.

    Args:
        function: dotted path of the class or function that creates environments.
        args: its keyword arguments.
        timeout_s: maximum wall seconds of one answer.
        num_processes: as in `TaskPool`.
    """

    def __init__(
        self, function: str, args: dict[str, Any], *, timeout_s: float, num_processes: int | None
    ) -> None:
        resolve_environment(function)
        read = partial(read_reply, function=function)
        super().__init__(Setup(TASK, function, args, timeout_s), num_processes, "environment", read)

    def open(self, examples: Sequence[dict[str, Any]]) -> list[EnvironmentReply]:
        """Create an environment for each example; return the initial replies."""
        return self._replies(examples)

    def step(self, turns: Sequence[StepRequest]) -> list[EnvironmentReply]:
        """Answer one turn of each of several conversations, in order."""
        return self._replies(turns)

    def _replies(self, items: Sequence[Any]) -> list[EnvironmentReply]:
        ended = StepResult("", 0.0, True)
        return [
            EnvironmentReply("", ended, found.kind, found.reason)
            if isinstance(found, Failure)
            else found
            for found in self.run(items)
        ]
