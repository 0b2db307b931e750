"""Errors of workers, as plain text that can be sent to the driver."""

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from hybridrl.config.errors import ConfigError, Problem

logger = logging.getLogger(__name__)


class WorkerError(RuntimeError):
    """Failure of a worker: an exception, a death or a timeout.

    Args:
        ranks: ranks concerned, the most suspicious first.
        phase: call in progress, "actor.update" or "start: rendezvous".
        message: full report with rank, node, phase, root traceback and log file.
    """

    def __init__(self, ranks: list[int], phase: str, message: str) -> None:
        super().__init__(ranks, phase, message)
        self.ranks = ranks
        self.phase = phase
        self.message = message

    def __str__(self) -> str:
        return self.message


class RemoteError(Exception):
    """Exception of a worker process as text, because not every exception can be pickled.

    Args:
        summary: type and message on one line.
        trace: traceback, with those of the causes first.
        problems: problems of a ConfigError, else empty.
        phase: work in progress; empty: the phase that the driver called.
    """

    def __init__(self, summary: str, trace: str, problems: list[Problem], phase: str) -> None:
        super().__init__(summary, trace, problems, phase)
        self.summary = summary
        self.trace = trace
        self.problems = problems
        self.phase = phase

    def __str__(self) -> str:
        return f"{self.summary}\n{self.trace}"


@contextmanager
def errors_as_text(phase: str = "") -> Iterator[None]:
    """Convert any exception of the block to a RemoteError of this phase, and log it."""
    try:
        yield
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        logger.error("%s", text)
        summary = traceback.format_exception_only(error)[-1].strip()
        problems = error.problems if isinstance(error, ConfigError) else list[Problem]()
        raise RemoteError(summary, text, problems, phase) from None
