"""Pool of processes that runs one function over items, each of which may fail in any way.

    items -> chunks -> processes -> one result per item, sent when it is computed

Results of a function arrive in order, so the item that hung or killed its process is the first one
without a result. It fails, the process is replaced, and the rest of its chunk is assigned again. No
item is computed twice.

A process of an async function has several items under way. When it ends or hangs, the guilty one
is not known. So these items are computed again at the end, each alone in its process.
"""

import logging
import math
import os
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any, Self

from hybridrl.processes.messages import (
    OUTPUT,
    START,
    Failure,
    FailureKind,
    Indexed,
    Setup,
)
from hybridrl.processes.process import START_TIMEOUT_S, PoolProcess, environment_for
from hybridrl.processes.supervisor import describe_exit
from hybridrl.processes.texts import last_frame

_logger = logging.getLogger(__name__)

MAX_PROCESSES = 8
# Small chunks balance the load; larger ones save round trips.
MAX_CHUNK_ITEMS = 8
# Causes of failures that a pool logs and counts each; further ones are counted together.
MAX_LOGGED_CAUSES = 10
OTHER_CAUSES = "other causes"
# Failed starts in a row, without an item as cause, that raise an error.
MAX_FAILED_STARTS = 3


class ProcessesError(RuntimeError):
    """Failed start of a pool's processes, not caused by an item; or their end."""


class TaskPool:
    """Pool of processes that compute items. They start in the background.

    Use it as a context manager or call `close`. The processes also end when this process dies.

    Args:
        setup: function to compute.
        num_processes: None: one per core that this process may use, at most `most`.
        what: name of results and processes in logs and errors ("reward").
        read: decodes a value from its JSON form; may raise TypeError and ValueError.
        repeated: what an item is replaced by before it is computed again.
    """

    def __init__(
        self,
        setup: Setup,
        num_processes: int | None,
        what: str,
        read: Callable[[Any], Any],
        *,
        most: int = MAX_PROCESSES,
        repeated: Callable[[Any], Any] = lambda item: item,
    ) -> None:
        self._setup, self._what = setup, what
        self._read, self._repeated = read, repeated
        self._failed: Counter[str] = Counter()  # items by cause, see `_cause`
        self._failed_starts = 0
        self._is_stopped = False
        self._chunk_items = 1
        self._waiting: deque[Indexed] = deque()  # items without a process
        self._suspects: deque[Indexed] = deque()  # items to be computed alone
        self._results: dict[int, Any] = {}
        if withheld := ", ".join(sorted(os.environ.keys() - environment_for(setup.args).keys())):
            text = "%s processes start without %s; name a variable in the arguments to pass it on"
            _logger.info(text, what, withheld)
        # A process ends with the thread that started it; `run` may be called in any thread.
        self._starter = ThreadPoolExecutor(1, f"start {what}")
        self._processes: list[PoolProcess] = []
        try:
            for _ in range(num_processes or min(len(os.sched_getaffinity(0)), most)):
                self._processes.append(self._start())
        except BaseException:  # a signal: Python would wait for the thread at its end, for ever
            self.close()
            raise

    def run(self, items: Sequence[Any]) -> list[Any]:
        """Return the value or `Failure` of each item, in order.

        Raises:
            ProcessesError: processes do not start up.
        """
        self._waiting, self._results, results = deque(enumerate(items)), {}, dict[int, Any]()
        self._suspects.clear()
        chunk_items = len(items) // (4 * len(self._processes))
        self._chunk_items = min(max(chunk_items, 1), MAX_CHUNK_ITEMS)
        try:
            while len(results) < len(items):
                results |= self.advance(())
        except BaseException:  # the results are not needed any more
            for process in self._processes:
                if process.pending:
                    self._replace(process)
            raise
        in_order = [results[index] for index in range(len(items))]
        self.log(in_order)
        return in_order

    def put_first(self, items: Sequence[Indexed]) -> None:
        """Add items that are computed before those that wait."""
        self._waiting.extendleft(reversed(items))

    def advance(self, new: Iterable[Indexed], *bells: socket.socket) -> dict[int, Any]:
        """Add items, wait for an event or a bell, and return new results by index.

        Raises:
            ProcessesError: processes do not start up, or `stop` was called.
        """
        assert self._processes, "the pool is closed"
        self._waiting.extend(new)
        while sum(self._hand_to(process) for process in list(self._processes)):
            pass  # until all items are assigned, or no process has room for more
        if not self._is_stopped:  # the bell of `stop` may have rung before
            self._collect(bells)
        if self._is_stopped:  # also where the end of a process was its item's result
            raise ProcessesError(f"the {self._what} processes were stopped")
        results, self._results = self._results, {}
        return results

    def stop(self) -> None:
        """Make `run` or `advance` in another thread raise ProcessesError, soon."""
        self._is_stopped = True
        for process in self._processes:
            process.ask_to_end()

    def close(self) -> None:
        """End all processes and those they started; log how often which failure occurred.

        A second call does nothing.
        """
        for cause, count in self._failed.items():
            if count > 1:
                _logger.warning("%s failed %d times in all: %s", self._what, count, cause)
        self._failed.clear()
        processes, self._processes = self._processes, []
        for process in processes:
            process.ask_to_end()
        for process in processes:
            process.end()
        self._starter.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hand_to(self, process: PoolProcess) -> int:
        """Assign the next items to a process, as many as it has room for; return their number."""
        suspects = self._suspects if process.is_async and not self._waiting else deque()
        room = self._room_of(process)
        if suspects and room and not process.pending:
            chunk = [suspects.popleft()]
        else:
            chunk = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
        if chunk:
            try:
                process.hand_out(chunk)
            except OSError:  # it failed before: not caused by these items
                self._waiting.extendleft(reversed(chunk))
                self._fail_current(process, FailureKind.error)
        return len(chunk)

    def _room_of(self, process: PoolProcess) -> int:
        """Return how many more items a process may have: a chunk if idle, or its share if async."""
        count = len(self._processes)
        if not process.is_async:
            return 0 if process.pending else self._chunk_items
        share, rest = divmod(self._setup.concurrency, count)
        share += self._processes.index(process) < rest
        # An even share of few items: they may also need time to compute.
        few = math.ceil(max(len(self._waiting), 1) / count)
        return min(share - len(process.pending), few)

    def _collect(self, bells: Sequence[socket.socket]) -> None:
        """Wait for an event; store results and replace processes that ended or hang."""
        awaited = [process for process in self._processes if process.pending]
        soonest = min((process.deadline for process in awaited), default=math.inf)
        timeout = None if soonest == math.inf else max(0.0, soonest - time.monotonic())
        wait([*bells, *(process.socket for process in awaited)], timeout)
        for process in awaited:
            try:
                for index, result in process.receive():
                    self._store(index, result)
            except (EOFError, OSError):
                self._fail_current(process, FailureKind.error)
            except (TypeError, ValueError, RecursionError):
                reason = "its process sent an invalid message and was killed"
                self._fail_current(process, FailureKind.error, reason)
            else:
                if time.monotonic() > process.deadline:
                    reason = f"took longer than {self._setup.timeout_s:g} s and could not be "
                    reason += "interrupted; its process was killed"
                    if process.is_async:
                        reason += " (a call in an async function blocks, or ignores cancellation)"
                    self._fail_current(process, FailureKind.timeout, reason)

    def _store(self, index: int, result: Any) -> None:
        if index != START:
            self._results[index] = result if isinstance(result, Failure) else self._read(result)
        elif isinstance(result, Failure):
            raise ProcessesError(f"{self._what} processes cannot start:\n{result.traceback}")
        else:
            self._failed_starts = 0

    def _fail_current(self, process: PoolProcess, kind: FailureKind, reason: str = "") -> None:
        """Fail the current item of a process, put its other items back and replace it.

        Several items that were under way are put back to be computed alone. Without a reason the
        process ended by itself.
        """
        exit_code = self._replace(process)
        if not process.pending:
            return
        (index, _), *others = begun = [*process.pending.items()]
        if process.is_async and others:
            self._suspects.extend((number, self._repeated(item)) for number, item in begun)
            return
        self._waiting.extendleft(reversed(others))
        if index == START:
            self._count_failed_start(exit_code)
        else:
            reason = reason or f"its process ended, {describe_exit(exit_code)}"
            self._results[index] = Failure(index, kind, reason)

    def _replace(self, process: PoolProcess) -> int:
        """End a process and start a new one; return the exit code."""
        exit_code = process.end()
        self._processes[self._processes.index(process)] = self._start()
        return exit_code

    def _start(self) -> PoolProcess:
        return self._starter.submit(PoolProcess, self._setup).result()

    def _count_failed_start(self, exit_code: int) -> None:
        self._failed_starts += 1
        if self._failed_starts >= MAX_FAILED_STARTS:
            raise ProcessesError(
                f"{self._failed_starts} {self._what} processes in a row ended before they could "
                f"run {self._setup.function}, the last {describe_exit(exit_code)}, or took longer "
                f"than {START_TIMEOUT_S:g} s to start; see their output above"
            )

    def log(self, results: Sequence[Any]) -> None:
        """Log the first failure of each cause, and the number of such failures in the batch."""
        by_cause: dict[str, list[Failure]] = {}
        for place, result in enumerate(results):
            if isinstance(result, Failure):
                by_cause.setdefault(_cause(result), []).append(replace(result, index=place))
        for cause, failures in by_cause.items():
            if cause not in self._failed:
                if len(self._failed) >= MAX_LOGGED_CAUSES:
                    cause = OTHER_CAUSES
                else:
                    self._log_first(failures, len(results))
            self._failed[cause] += len(failures)

    def _log_first(self, failures: list[Failure], count: int) -> None:
        first = failures[0]
        # Without frames or output of the user it is the reason again.
        says_more = last_frame(first.traceback) or f"\n  {OUTPUT}" in first.traceback
        trace = f"\n{first.traceback}" if says_more else ""
        text = "%s failed for %d of %d, first for item %d: %s%s"
        _logger.warning(text, self._what, len(failures), count, first.index, first.reason, trace)


def _cause(failure: Failure) -> str:
    """Return type of the exception, and the user's line that led to it."""
    where = last_frame(failure.traceback)
    kind = failure.reason.partition(":")[0]
    return f"{kind}, {where}" if where else kind
