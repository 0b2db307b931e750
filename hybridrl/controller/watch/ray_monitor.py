"""Notices that Ray itself is gone or stands still, which Ray tells late or not at all.

Of the Ray that was started here the ids of its processes are known. Without its control process
(GCS) a program goes on for a minute, and then Ray ends it; without a raylet it ends at the next
object that is put; with a raylet that is stopped it waits for ever. A cluster that was joined is
asked at its head's port.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from ray.exceptions import RayError

from hybridrl.controller.errors import WorkerError
from hybridrl.controller.ray.compat import local_folder, local_processes
from hybridrl.controller.ray.head import connect, head_place, ray_address
from hybridrl.controller.watch.clock import StoppedTimes, WatchClock
from hybridrl.controller.watch.janitor import SHARED_MEMORY_LIST
from hybridrl.controller.watch.process_snapshot import GONE, is_stopped, state_of

logger = logging.getLogger(__name__)

EVERY_S = 1.0
# Looks at the head of a joined cluster, and how many in a row find nothing before it counts.
HEAD_EVERY_S, HEAD_MISSES = 8.0, 3
# A process that is being killed closes its connections a little before it counts as gone.
DYING_S = 0.3
# Seconds until this has found that a process is stopped for too long, if others find it, too.
SETTLED_S = 2.5


def is_local_ray_broken() -> bool:
    """Whether the Ray that was started here has lost a process, or one of them is stopped."""
    pids = local_processes().values()
    return any(state_of(pid) in GONE or is_stopped(pid) for pid in pids)


def register_shared_memory(paths: Sequence[str]) -> None:
    """Have files removed with the folder of the Ray that was started here, whoever ends it."""
    if local_processes():
        with (local_folder().parent / SHARED_MEMORY_LIST).open("a") as file:
            file.writelines(f"{path}\n" for path in paths)


class RayMonitor:
    """Watches the Ray that this process uses, from a thread of its own.

    Args:
        still_s: seconds for which a process of Ray may be stopped; 0: for ever.
    """

    def __init__(self, still_s: float) -> None:
        self._pids = local_processes()
        self._still_s = still_s
        self._stopped = StoppedTimes()
        self._finding = ""
        self._closing = threading.Event()
        watch = self._watch_processes if self._pids else self._watch_head
        self._thread = threading.Thread(target=watch, name="ray watch", daemon=True)
        self._thread.start()

    @property
    def is_head_lost(self) -> bool:
        """Whether a cluster was joined whose head does not answer any more."""
        return bool(self._finding) and not self._pids

    def check(self, phase: str) -> None:
        """See whether Ray is there; takes microseconds.

        Raises:
            WorkerError: it is not, which shows in this phase.
        """
        for name, pid in self._pids.items():
            if not self._finding and state_of(pid) in GONE:
                self._finding = f"Ray's {name} (pid {pid}) on this machine died"
        if self._finding:
            advice = "Its workers cannot go on without it."
            raise WorkerError([], phase, f"{self._finding} in {phase}. {advice}")

    def check_behind(self, phase: str) -> None:
        """As `check`, after something else has failed: Ray may be what is behind it."""
        deadline = time.monotonic() + SETTLED_S
        if self._pids:
            time.sleep(DYING_S)
        while not self._finding and time.monotonic() < deadline and is_local_ray_broken():
            self.check(phase)
            time.sleep(DYING_S)
        self.check(phase)

    @contextmanager
    def guarded(self, phase: str) -> Iterator[None]:
        """Calls of this process into Ray, which must be there.

        Raises:
            WorkerError: it is not, or fails one of them.
        """
        self.check(phase)
        try:
            yield
        except RayError as error:
            self.check_behind(phase)
            told = f"Ray failed in {phase}: {type(error).__name__}: {error}"
            raise WorkerError([], phase, told) from error

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        self._thread.join()

    def _watch_processes(self) -> None:
        clock = WatchClock(longest_gap_s=2 * EVERY_S)
        while not self._closing.wait(EVERY_S):
            now = clock.now()
            for name, pid in self._pids.items():
                self._look_whether_stopped(name, pid, now)

    def _look_whether_stopped(self, name: str, pid: int, now: float) -> None:
        if self._stopped.seconds(pid, now) >= self._still_s > 0:
            self._finding = (
                f"Ray's {name} (pid {pid}) on this machine was stopped by a signal for "
                f"cluster.stall_timeout_s={self._still_s:g} s; the run noticed"
            )
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)  # who waits for it inside Ray comes back

    def _watch_head(self) -> None:
        address = ray_address()
        place = None if address is None else head_place(address)
        if place is None:
            return
        misses = 0
        while not self._closing.wait(HEAD_EVERY_S):
            problem = connect(*place).problem
            misses = misses + 1 if problem else 0
            if misses >= HEAD_MISSES:
                self._finding = f"Ray's head at {address} does not answer ({problem}): it was lost"
                return
