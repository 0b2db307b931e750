"""What the driver tells a process to run, and what it answers."""

from typing import Any, NamedTuple

from hybridrl.controller.spans import Span


class RoleCall(NamedTuple):
    """A method of a role, to be run in every process.

    Attributes:
        role, method: what to run.
        args, kwargs: its arguments, after the rank's part of a batch if there is one.
        keep: whether the result is wanted from this process.
    """

    role: str
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    keep: bool

    @property
    def name(self) -> str:
        """For messages: "actor.update"."""
        return f"{self.role}.{self.method}"


class TimedResult(NamedTuple):
    """A call's result and when it was at work: in one process, or in the one that took longest."""

    value: Any
    span: Span
