"""SIGINT, SIGTERM and SIGHUP as one exception in the main thread.

SIGHUP says that the terminal is gone, and means what SIGTERM means. Both the kernel and the shell
send it then, so it counts once: from the first on it is ignored. Under nohup it always is.
"""

import logging
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

logger = logging.getLogger(__name__)

# Those that a scheduler or a terminal ends a program with.
TERMINATING = (signal.SIGTERM, signal.SIGHUP)
SIGNALS = (signal.SIGINT, *TERMINATING)


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
    _count_once(signum)
    raise Interrupted(signum)


def interrupt_on_termination() -> None:
    """Let SIGTERM, and SIGHUP unless it is ignored, end this process as Ctrl-C does."""
    signal.signal(signal.SIGTERM, interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, interrupt)


def _count_once(signum: int) -> None:
    if signum == signal.SIGHUP:
        signal.signal(signum, signal.SIG_IGN)


class SignalGuard:
    """While it is entered, signals raise `Interrupted`; then old handlers return.

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
        _count_once(signum)
        self._received = signum
        raise Interrupted(signum)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _restore(self._previous)
        if isinstance(error, KeyboardInterrupt) and not isinstance(error, Interrupted):
            raise Interrupted(self._received or signal.SIGINT) from None


def _restore(previous: Mapping[int, Any]) -> None:
    """Give signals their handlers back, but for a SIGHUP that has come."""
    for signum, handler in previous.items():
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, handler)


class Preempted(Interrupted):
    """The run has ended as SIGTERM or SIGHUP asked it to, in time for a checkpoint.

    Args:
        signum: the signal.
        checkpoint: to go on from; None: it could not be written.
    """

    def __init__(self, signum: int, checkpoint: Path | None) -> None:
        super().__init__(signum)
        self.checkpoint = checkpoint


def preemption_behind(error: BaseException | None) -> Preempted | None:
    """With what a preempted run ended, whatever came while it was ending."""
    while error is not None and not isinstance(error, Preempted):
        error = error.__context__
    return error


class Preemption:
    """While it is entered, SIGTERM and SIGHUP ask for an end within a time, not at once.

    When the time is over, or at a second SIGTERM, `Interrupted` is raised wherever the program is.
    An error in that time may come of processes that got it, too, and leaves as `Interrupted`.
    To be entered in the main thread, inside a `SignalGuard`.

    Args:
        grace_s: the time, in seconds; 0: they end at once.

    Attributes:
        asked_by: the signals that have come, in order.
    """

    def __init__(self, grace_s: float) -> None:
        self.asked_by: list[int] = []
        self._has_ended = False
        self._grace_s = grace_s
        self._previous: dict[int, Any] = {}

    @property
    def is_asked(self) -> bool:
        """Whether the run is asked to end."""
        return bool(self.asked_by)

    def __enter__(self) -> "Preemption":
        if self._grace_s > 0:
            for signum in TERMINATING:
                if signal.getsignal(signum) is not signal.SIG_IGN:
                    self._previous[signum] = signal.signal(signum, self._ask)
            self._previous[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._end)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._previous:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        _restore(self._previous)
        if self._has_ended and type(error) is KeyboardInterrupt:  # Ray forgets the subclass
            raise Interrupted(self.asked_by[0]) from None
        if self.is_asked and isinstance(error, Exception):
            logger.error("after %s: %s", signal.Signals(self.asked_by[0]).name, error)
            raise Interrupted(self.asked_by[0]) from error

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        _count_once(signum)
        self.asked_by.append(signum)
        if self.asked_by.count(signum) > 1:
            self._end(signum, frame)
        if len(self.asked_by) == 1:
            logger.warning(
                "%s: what is under way is ended, and a checkpoint written, within %g s",
                signal.Signals(signum).name,
                self._grace_s,
            )
            signal.setitimer(signal.ITIMER_REAL, self._grace_s)

    def _end(self, signum: int, frame: FrameType | None) -> None:
        self._has_ended = True
        raise Interrupted(self.asked_by[0])


@contextmanager
def shielded() -> Iterator[None]:
    """Let signals wait until the block is done, and raise `Interrupted` only then.

    For starting Ray and for shutting down: bounded in time, and not to be left half done.
    """
    received: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        _count_once(signum)
        logger.warning("%s: will be heeded in a moment", signal.Signals(signum).name)
        received.append(signum)

    heeded = [s for s in SIGNALS if signal.getsignal(s) not in (signal.SIG_IGN, None)]
    previous: dict[int, Any] = {signum: signal.signal(signum, note) for signum in heeded}
    try:
        yield
    finally:
        _restore(previous)
    if received:
        raise Interrupted(received[0])
