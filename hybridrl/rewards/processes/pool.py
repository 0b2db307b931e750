"""Process pool that runs one function over items, each of which may fail in any way.

    items -> chunks -> processes -> one result per item, sent when it is computed

Results arrive in order, so the item that hung or killed its process is the first one without a
result. It fails, the process is replaced, and the rest of its chunk is assigned again. No item is
computed twice.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any, Self

from hybridrl.config.user_code.supervisor import describe_exit
from hybridrl.rewards.processes.messages import START, Failure, FailureKind, Indexed, Setup
from hybridrl.rewards.processes.process import (
    START_TIMEOUT_S,
    RewardProcess,
    RewardProcessError,
    environment_for,
)

_logger = logging.getLogger(__name__)

MAX_PROCESSES = 8
# Small chunks balance the load; larger ones save round trips.
MAX_CHUNK_ITEMS = 8
# Tracebacks that a pool logs; later failures are only counted.
MAX_LOGGED_FAILURES = 3
# Failed starts in a row, without an item as cause, that raise an error.
MAX_FAILED_STARTS = 3


class TaskPool:
    """Pool of processes that compute items. They start in the background.

    Use it as a context manager or call `close`. The processes also end with the thread that created
    the pool, and when this process dies.

    Args:
        setup: function to compute.
        num_processes: None: one per core that this process may use, at most 8.
        what: name of results and processes in logs and errors ("reward").
        read: decodes a value from its JSON form; may raise TypeError and ValueError.
    """

    def __init__(
        self, setup: Setup, num_processes: int | None, what: str, read: Callable[[Any], Any]
    ) -> None:
        count = num_processes or min(len(os.sched_getaffinity(0)), MAX_PROCESSES)
        self._setup = setup
        self._what = what
        self._read = read
        self._num_logged = 0
        self._failed_starts = 0
        self._waiting: deque[Indexed] = deque()  # items without a process
        self._results: dict[int, Any] = {}
        withheld = sorted(os.environ.keys() - environment_for(setup.args).keys())
        if withheld:
            _logger.info(
                "%s processes start without %s; name a variable in the arguments to pass it on",
                what,
                ", ".join(withheld),
            )
        self._processes = [RewardProcess(setup) for _ in range(count)]

    def run(self, items: Sequence[Any]) -> list[Any]:
        """Return the value or `Failure` of each item, in order.

        Raises:
            RewardProcessError: processes do not start up.
        """
        assert self._processes, "the pool is closed"
        self._waiting, self._results = deque(enumerate(items)), {}
        share = len(items) // (4 * len(self._processes))
        chunk_items = min(max(share, 1), MAX_CHUNK_ITEMS)
        try:
            while len(self._results) < len(items):
                self._hand_out(chunk_items)
                self._collect()
        except BaseException:  # the results are not needed any more
            for process in self._processes:
                if process.pending:
                    self._replace(process)
            raise
        results = [self._results[index] for index in range(len(items))]
        self._log(results)
        return results

    def close(self) -> None:
        """End all processes and those they started. A second call does nothing."""
        for process in self._processes:
            process.ask_to_end()
        for process in self._processes:
            process.kill()
        self._processes = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hand_out(self, chunk_items: int) -> None:
        """Assign a chunk to every idle process while items are left."""
        for process in list(self._processes):
            if self._waiting and not process.pending:
                size = min(chunk_items, len(self._waiting))
                chunk = [self._waiting.popleft() for _ in range(size)]
                try:
                    process.hand_out(chunk)
                except OSError:  # it failed while idle: not caused by an item
                    self._waiting.extendleft(reversed(chunk))
                    self._replace(process)

    def _collect(self) -> None:
        """Wait for an event; store results and replace processes that ended or hang."""
        awaited = [process for process in self._processes if process.pending]
        soonest = min(process.deadline for process in awaited)
        timeout = max(0.0, soonest - time.monotonic())
        wait([process.socket for process in awaited], timeout)
        for process in awaited:
            try:
                for index, found in process.receive():
                    failed = isinstance(found, Failure)
                    if index != START:
                        self._results[index] = found if failed else self._read(found)
                    elif failed:
                        raise RewardProcessError(
                            f"{self._what} processes cannot start: {found.reason}"
                        )
                    else:
                        self._failed_starts = 0
            except (EOFError, OSError):
                self._fail_current(process, FailureKind.error)
            except (TypeError, ValueError, RecursionError):
                reason = "its process sent an invalid message and was killed"
                self._fail_current(process, FailureKind.error, reason)
            else:
                if time.monotonic() > process.deadline:
                    reason = f"took longer than {self._setup.timeout_s:g} s and could not be "
                    reason += "interrupted; its process was killed"
                    self._fail_current(process, FailureKind.timeout, reason)

    def _fail_current(self, process: RewardProcess, kind: FailureKind, reason: str = "") -> None:
        """Fail the current item of a process, put its other items back and replace it.

        Without a reason the process ended by itself.
        """
        exit_code = self._replace(process)
        if not process.pending:
            return
        (index, _), *others = process.pending
        self._waiting.extendleft(reversed(others))
        if index == START:
            self._count_failed_start(exit_code)
        else:
            reason = reason or f"its process ended, {describe_exit(exit_code)}"
            self._results[index] = Failure(index, kind, reason)

    def _replace(self, process: RewardProcess) -> int:
        """Kill a process and start a new one; return the exit code."""
        exit_code = process.kill()
        self._processes[self._processes.index(process)] = RewardProcess(self._setup)
        return exit_code

    def _count_failed_start(self, exit_code: int) -> None:
        self._failed_starts += 1
        if self._failed_starts >= MAX_FAILED_STARTS:
            raise RewardProcessError(
                f"{self._failed_starts} {self._what} processes in a row ended before they could "
                f"run {self._setup.function}, the last {describe_exit(exit_code)}, or took longer "
                f"than {START_TIMEOUT_S:g} s to start; see their output above"
            )

    def _log(self, results: Sequence[Any]) -> None:
        failures = [result for result in results if isinstance(result, Failure)]
        for failure in failures[: MAX_LOGGED_FAILURES - self._num_logged]:
            self._num_logged += 1
            _logger.warning(
                "%s of item %d failed: %s\n%s",
                self._what,
                failure.index,
                failure.reason,
                failure.traceback,
            )
