"""What goes wrong in workers, as plain text that survives the way to the driver."""

import logging
import traceback
from contextlib import ContextDecorator
from types import TracebackType

from hybridrl.config.errors import ConfigError

logger = logging.getLogger(__name__)


class WorkerError(RuntimeError):
    """A worker raised, died or did not answer in time.

    Args:
        ranks: the ranks concerned, the one to look at first in front.
        phase: what they were doing, "actor.update" or "start: rendezvous".
        message: the whole story: rank, node, phase, root traceback, log file.
    """

    def __init__(self, ranks: list[int], phase: str, message: str) -> None:
        super().__init__(ranks, phase, message)
        self.ranks = ranks
        self.phase = phase
        self.message = message

    def __str__(self) -> str:
        return self.message


class RemoteError(Exception):
    """An exception of a worker process as text, because not every exception can be pickled.

    Args:
        summary: its type and message on one line.
        trace: its traceback with those of its causes, the root first.
        problems: those of a ConfigError, else empty.
        phase: what the process was doing, "actor.update"; empty: what it had been asked to do.
    """

    def __init__(self, summary: str, trace: str, problems: list[str], phase: str) -> None:
        super().__init__(summary, trace, problems, phase)
        self.summary = summary
        self.trace = trace
        self.problems = problems
        self.phase = phase

    def __str__(self) -> str:
        return f"{self.summary}\n{self.trace}"


class errors_as_text(ContextDecorator):
    """Let whatever the block raises leave it as a RemoteError, and log it.

    Args:
        phase: the error's.
    """

    def __init__(self, phase: str = "") -> None:
        self._phase = phase

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            return
        text = "".join(traceback.format_exception(error))
        logger.error("%s", text)
        summary = traceback.format_exception_only(error)[-1].strip()
        problems = error.problems if isinstance(error, ConfigError) else []
        raise RemoteError(summary, text, problems, self._phase) from None
