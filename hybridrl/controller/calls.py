"""Messages between the driver and worker processes: calls of roles, and their results."""

from typing import Any, NamedTuple

from hybridrl.controller.spans import Span


class RoleCall(NamedTuple):
    """Call of a role's method, run in every process.

    `args` and `kwargs` follow the rank's part of a batch, if any; `keep` returns the result of this
    process to the driver.
    """

    role: str
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    keep: bool

    @property
    def name(self) -> str:
        """Name in messages: "actor.update"."""
        return f"{self.role}.{self.method}"


class TimedResult(NamedTuple):
    """Result of a call, and its span in one process or in the slowest."""

    value: Any
    span: Span
