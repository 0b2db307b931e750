"""SIGINT and SIGTERM as one exception in the main thread."""

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """A signal asks the run to end. Ray's blocking calls let no other exception type through.

    Args:
        signum: the signal; 128 + signum is the customary exit code.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum

    def __str__(self) -> str:
        return f"interrupted by {signal.Signals(self.signum).name}"


def interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    """A handler of signals: leave through every `finally`, as Ctrl-C does.

    Raises:
        Interrupted: always.
    """
    raise Interrupted(signum)


class SignalGuard:
    """While it is entered, SIGINT and SIGTERM raise `Interrupted`; then old handlers return.

    A plain KeyboardInterrupt (Ray forgets the subclass) leaves it as `Interrupted` too. To be
    entered in the main thread.
    """

    def __init__(self) -> None:
        self._previous: dict[int, Any] = {}
        self._received: int | None = None

    def __enter__(self) -> "SignalGuard":
        self._previous = {signum: signal.getsignal(signum) for signum in SIGNALS}
        for signum, previous in self._previous.items():
            if previous is not signal.SIG_IGN:  # a background job of a shell ignores Ctrl-C
                signal.signal(signum, self._handle)
        return self

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._received = signum
        raise Interrupted(signum)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for signum, previous in self._previous.items():
            signal.signal(signum, previous)
        if isinstance(error, KeyboardInterrupt) and not isinstance(error, Interrupted):
            raise Interrupted(self._received or signal.SIGINT) from None


class Preempted(Interrupted):
    """The run has ended as SIGTERM asked it to, in time for a checkpoint.

    Args:
        checkpoint: to go on from; None: it could not be written.
    """

    def __init__(self, checkpoint: Path | None) -> None:
        super().__init__(signal.SIGTERM)
        self.checkpoint = checkpoint


def written_in_time(error: BaseException | None) -> Path | None:
    """The checkpoint with which a preempted run ended, whatever came while it was ending."""
    while error is not None and not isinstance(error, Preempted):
        error = error.__context__
    return None if error is None else error.checkpoint


class Preemption:
    """While it is entered, SIGTERM asks for an end within a time instead of ending at once.

    When the time is over, or at the next SIGTERM, `Interrupted` is raised wherever the program is.
    An error in that time may come of processes that got it, too, and leaves as `Interrupted`.
    To be entered in the main thread, inside a `SignalGuard`.

    Args:
        grace_s: the time, in seconds; 0: SIGTERM ends at once.

    Attributes:
        is_asked: whether SIGTERM has come.
    """

    def __init__(self, grace_s: float) -> None:
        self.is_asked = False
        self._has_ended = False
        self._grace_s = grace_s
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Preemption":
        if self._grace_s > 0:
            for signum, handler in ((signal.SIGTERM, self._ask), (signal.SIGALRM, self._end)):
                self._previous[signum] = signal.signal(signum, handler)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._previous:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        if self._has_ended and type(error) is KeyboardInterrupt:  # Ray forgets the subclass
            raise Interrupted(signal.SIGTERM) from None
        if self.is_asked and isinstance(error, Exception):
            logger.error("after SIGTERM: %s", error)
            raise Interrupted(signal.SIGTERM) from error

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        if self.is_asked:
            self._end(signum, frame)
        self.is_asked = True
        logger.warning(
            "SIGTERM: what is under way is ended, and a checkpoint written, within %g s",
            self._grace_s,
        )
        signal.setitimer(signal.ITIMER_REAL, self._grace_s)

    def _end(self, signum: int, frame: FrameType | None) -> None:
        self._has_ended = True
        raise Interrupted(signal.SIGTERM)


@contextmanager
def shielded() -> Iterator[None]:
    """Let signals wait until the block is done, and raise `Interrupted` only then.

    For starting Ray and for shutting down: bounded in time, and not to be left half done.
    """
    received: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        logger.warning("%s: will be heeded in a moment", signal.Signals(signum).name)
        received.append(signum)

    heeded = [s for s in SIGNALS if signal.getsignal(s) not in (signal.SIG_IGN, None)]
    previous = {signum: signal.signal(signum, note) for signum in heeded}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
    if received:
        raise Interrupted(received[0])
