"""Calls of a service in their order, one after the other, in a thread of their own.

Samples that wait together are sampled together, and others join while they decode, until a call of
another kind, or for other weights, waits.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Condition, Thread
from typing import Any

from hybridrl.service.data import Sampling, ServiceError

log = logging.getLogger(__name__)

# Seconds that `close` waits for the call under way.
END_S = 10.0


@dataclass(frozen=True)
class Asked:
    """`count` samples that are asked for, by weights of a name."""

    prompt: Sequence[int]
    count: int
    sampling: Sampling
    weights: str


@dataclass(frozen=True)
class Call:
    """A call: a function, or samples."""

    work: Callable[[], Any] | Asked
    future: Future[Any] = field(default_factory=Future)


class Calls:
    """Queue of calls, and the thread that does them.

    Args:
        sample: does a call for samples; it takes the others by `joining`.
        changed: called in any thread after a call was added.
    """

    def __init__(self, sample: Callable[[Call], None], changed: Callable[[], None]) -> None:
        self._sample, self._changed = sample, changed
        self._waiting: deque[Call] = deque()
        self._condition = Condition()
        self._error: BaseException | None = None  # why no call can be done any more
        self._thread = Thread(target=self._run, name="service", daemon=True)
        self._thread.start()

    def add(self, work: Callable[[], Any] | Asked) -> Future[Any]:
        """Add a call; its future gets the result, or the error."""
        call = Call(work)
        with self._condition:
            if self._error is not None:
                raise ServiceError(f"the service has ended: {self._error}") from self._error
            self._waiting.append(call)
            self._condition.notify()
        self._changed()
        return call.future

    def joining(self, weights: str) -> list[Call]:
        """Take the calls for samples by these weights that wait before any other."""
        taken = []
        with self._condition:
            while self._waiting:
                work = self._waiting[0].work
                if not isinstance(work, Asked) or work.weights != weights:
                    break
                taken.append(self._waiting.popleft())
        return [call for call in taken if call.future.set_running_or_notify_cancel()]

    def refuse(self, error: BaseException) -> None:
        """Refuse the calls that wait, and further ones."""
        with self._condition:
            self._error = self._error or error
            waiting, self._waiting = self._waiting, deque()
            self._condition.notify()
        for call in waiting:
            if call.future.set_running_or_notify_cancel():
                call.future.set_exception(ServiceError(f"the service has ended: {error}"))

    def join(self) -> None:
        """Wait for the end of the call under way, after `refuse`."""
        self._thread.join(END_S)

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._waiting or self._error)
                if self._error is not None:
                    return
                call = self._waiting.popleft()
            if not call.future.set_running_or_notify_cancel():
                continue
            try:
                if isinstance(call.work, Asked):
                    self._sample(call)
                else:
                    call.future.set_result(call.work())
            except ServiceError as error:
                call.future.set_exception(error)
            except BaseException as error:  # the workers are in an unknown state
                log.exception("The service has ended")
                if not call.future.done():
                    call.future.set_exception(error)
                self.refuse(error)
