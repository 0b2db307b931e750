"""SIGINT, SIGTERM and SIGHUP as one exception in the main thread.

SIGHUP (terminal lost) has the effect of SIGTERM. The kernel and the shell both send it, so it is
ignored after the first one. Under nohup it is always ignored.
"""

import logging
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

logger = logging.getLogger(__name__)

# Signals with which a scheduler or terminal ends a program.
TERMINATING = (signal.SIGTERM, signal.SIGHUP)
SIGNALS = (signal.SIGINT, *TERMINATING)

Handler = Callable[[int, FrameType | None], None]


class Interrupted(KeyboardInterrupt):
    """Request of a signal to end the run. Ray's blocking calls pass no other exception type.

    The usual exit code is 128 + `signum`. `how_to_resume` completes the message.
    """

    how_to_resume = ""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum

    def __str__(self) -> str:
        return f"Stopped by {signal.Signals(self.signum).name}{self.how_to_resume}"


@contextmanager
def _handling(signals: Iterable[int], handler: Handler) -> Iterator[None]:
    """Handle signals that are not ignored; afterwards restore the handlers, but of a SIGHUP.

    Outside the main thread, where Python allows no handlers, nothing is handled.
    """

    def handle(signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGHUP:
            signal.signal(signum, signal.SIG_IGN)
        handler(signum, frame)

    is_main = threading.current_thread() is threading.main_thread()
    # A background job of a shell ignores Ctrl-C. None: a handler that Python cannot restore.
    heeded = [s for s in signals if is_main and signal.getsignal(s) not in (signal.SIG_IGN, None)]
    previous = {signum: signal.signal(signum, handle) for signum in heeded}
    try:
        yield
    finally:
        for signum, before in previous.items():
            if signal.getsignal(signum) is not signal.SIG_IGN:  # a SIGHUP has come
                signal.signal(signum, before)


@contextmanager
def signal_guard() -> Iterator[None]:
    """Raise `Interrupted` in the block on a signal; restores the handlers at the end.

    A plain KeyboardInterrupt, to which Ray reduces the subclass, becomes `Interrupted` as well.
    Enter it in the main thread.
    """
    received = [int(signal.SIGINT)]

    def interrupt(signum: int, frame: FrameType | None) -> NoReturn:
        received.append(signum)
        raise Interrupted(signum)

    with _handling(SIGNALS, interrupt):
        try:
            yield
        except Interrupted:
            raise
        except KeyboardInterrupt:
            raise Interrupted(received[-1]) from None


class Preempted(Interrupted):
    """Preemption: the run has ended on SIGTERM or SIGHUP, after an attempt to checkpoint.

    Without a checkpoint to resume from, it could not be written.
    """

    def __init__(self, signum: int, checkpoint: Path | None) -> None:
        super().__init__(signum)
        self.checkpoint = checkpoint
        self.how_to_resume = f"; resume from {checkpoint}" if checkpoint else ""


def preemption_behind(error: BaseException | None) -> Preempted | None:
    """Return the `Preempted` among an error and its contexts, or None."""
    while error is not None and not isinstance(error, Preempted):
        error = error.__context__
    return error


class Preemption:
    """Context manager in which SIGTERM and SIGHUP request an end within a grace period.

    After the period of `grace_s` seconds (0: none), or on a second SIGTERM, `Interrupted` is
    raised. An error in the period becomes `Interrupted`, because other processes may have got the
    signal as well. Enter it in the main thread, inside `signal_guard`. `asked_by` are the signals
    received, in order.
    """

    def __init__(self, grace_s: float) -> None:
        self.asked_by: list[int] = []
        self._has_ended = False
        self._grace_s = grace_s
        self._handlers = ExitStack()

    @property
    def is_asked(self) -> bool:
        """True after a signal."""
        return bool(self.asked_by)

    def __enter__(self) -> "Preemption":
        if self._grace_s > 0:
            self._handlers.enter_context(_handling(TERMINATING, self._ask))
            self._handlers.enter_context(_handling([signal.SIGALRM], self._end))
            self._handlers.callback(signal.setitimer, signal.ITIMER_REAL, 0.0)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._handlers.close()
        if self._has_ended and type(error) is KeyboardInterrupt:  # Ray drops the subclass
            raise Interrupted(self.asked_by[0]) from None
        if self.is_asked and isinstance(error, Exception):
            logger.error("after %s: %s", signal.Signals(self.asked_by[0]).name, error)
            raise Interrupted(self.asked_by[0]) from error

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        self.asked_by.append(signum)
        if self.asked_by.count(signum) > 1:
            self._end(signum, frame)
        if len(self.asked_by) == 1:
            logger.warning(
                "%s: the run ends its current work and writes a checkpoint within %g s",
                signal.Signals(signum).name,
                self._grace_s,
            )
            signal.setitimer(signal.ITIMER_REAL, self._grace_s)

    def _end(self, signum: int, frame: FrameType | None) -> None:
        self._has_ended = True
        raise Interrupted(self.asked_by[0])


@contextmanager
def shielded() -> Iterator[None]:
    """Defer signals to the end of the block, and raise `Interrupted` there.

    For the start of Ray and for shutdown, which are bounded in time and must complete.
    """
    received: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        logger.warning("%s: handled after the start or shutdown", signal.Signals(signum).name)
        received.append(signum)

    with _handling(SIGNALS, note):
        yield
    if received:
        raise Interrupted(received[0])
