"""Ray monitor: detects lost or stopped processes of Ray, which Ray reports late or never.

Without the control process (GCS), Ray ends a program after a minute, without a raylet at the next
`ray.put`. With a stopped raylet it waits for ever. Processes of a Ray started here are checked by
their ids, a joined cluster at the port of its head.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import ray
from ray.exceptions import RayError

from hybridrl.controller.errors import WorkerError
from hybridrl.controller.ray.compat import local_folder, local_processes
from hybridrl.controller.ray.head import connect, head_place
from hybridrl.controller.watch.janitor import SHARED_MEMORY_LIST
from hybridrl.controller.watch.process_snapshot import (
    GONE,
    Unchanged,
    WatchClock,
    is_stopped,
    state_of,
)

logger = logging.getLogger(__name__)

EVERY_S = 1.0
# Interval of checks of a joined cluster's head; failed checks in a row until it counts as lost.
HEAD_EVERY_S, HEAD_MISSES = 8.0, 3
# A killed process closes its connections slightly before it has ended.
DYING_S = 0.3
# Seconds in which the monitor detects a stopped process after others have.
SETTLED_S = 2.5


def is_local_ray_broken() -> bool:
    """Return True if a process of the Ray started here has ended or is stopped."""
    pids = local_processes().values()
    return any(state_of(pid) in GONE or is_stopped(pid) for pid in pids)


def register_shared_memory(paths: Sequence[str]) -> None:
    """Register files for removal with the folder of the Ray started here."""
    if local_processes():
        with (local_folder().parent / SHARED_MEMORY_LIST).open("a") as file:
            file.writelines(f"{path}\n" for path in paths)


class RayMonitor:
    """Monitor of the Ray that this process uses, in a thread.

    A process of Ray may be stopped for `limit_s` seconds; 0: no limit.
    """

    def __init__(self, limit_s: float) -> None:
        self._pids = local_processes()
        self._limit_s = limit_s
        self._finding = ""
        self._closing = threading.Event()
        watch: Callable[[], None] = self._watch_processes
        if not self._pids:
            # RAY_ADDRESS may be `auto`.
            watch = partial(self._watch_head, ray.get_runtime_context().gcs_address)
        self._thread = threading.Thread(target=watch, name="ray watch", daemon=True)
        self._thread.start()

    @property
    def is_head_lost(self) -> bool:
        """True if the head of a joined cluster no longer answers."""
        return bool(self._finding) and not self._pids

    def check(self, phase: str) -> None:
        """Raise WorkerError, of this phase, if Ray is lost; takes microseconds."""
        for name, pid in self._pids.items():
            if not self._finding and state_of(pid) in GONE:
                self._finding = f"Ray's {name} (pid {pid}) on this machine died"
        if self._finding:
            advice = "Its workers cannot continue without it."
            raise WorkerError([], phase, f"{self._finding} in {phase}. {advice}")

    def check_after_failure(self, phase: str) -> None:
        """Check after another failure, of which Ray may be the cause."""
        deadline = time.monotonic() + SETTLED_S
        if self._pids:
            time.sleep(DYING_S)
        while not self._finding and time.monotonic() < deadline and is_local_ray_broken():
            self.check(phase)
            time.sleep(DYING_S)
        self.check(phase)

    @contextmanager
    def guarded(self, phase: str) -> Iterator[None]:
        """Raise WorkerError if Ray is lost, or a call into Ray in the block fails."""
        self.check(phase)
        try:
            yield
        except RayError as error:
            self.check_after_failure(phase)
            message = f"Ray failed in {phase}: {type(error).__name__}: {error}"
            raise WorkerError([], phase, message) from error

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        self._thread.join()

    def _watch_processes(self) -> None:
        clock, stopped = WatchClock(longest_gap_s=2 * EVERY_S), Unchanged()
        while not self._closing.wait(EVERY_S):
            now = clock.now()
            for name, pid in self._pids.items():
                if not stopped.seconds_stopped(pid, now) >= self._limit_s > 0:
                    continue
                self._finding = (
                    f"Ray's {name} (pid {pid}) on this machine was stopped by a signal for "
                    f"cluster.stall_timeout_s={self._limit_s:g} s"
                )
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)  # calls that wait for it inside Ray return

    def _watch_head(self, address: str) -> None:
        place, misses = head_place(address), 0
        assert place is not None, address
        while not self._closing.wait(HEAD_EVERY_S):
            problem = connect(*place).problem
            misses = misses + 1 if problem else 0
            if misses >= HEAD_MISSES:
                self._finding = f"Ray's head at {address} does not answer ({problem}): it was lost"
                return
