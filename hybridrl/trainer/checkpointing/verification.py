"""Verification of large checkpoints: progress for the user, and work shared among nodes."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path

from hybridrl.checkpoint.manifest import FileRecord
from hybridrl.checkpoint.verification import Watch, digests
from hybridrl.controller.ray.node_probes import NodeProbes

log = logging.getLogger(__name__)

# Seconds until the first line and between lines: small checkpoints print none.
FIRST_S, EVERY_S = 3.0, 10.0
# Share of a node per call: so many files, or small ones of so many bytes.
SHARE_FILES, SHARE_BYTES = 8, 8 * 2**30
# Timeout of a share, after which the driver reads it; interval while the cluster starts.
SHARE_S, LOOK_S = 1800.0, 0.2


class VerificationEnded(Exception):
    """The verification was cancelled."""


class VerificationProgress:
    """Progress callback of verifications, which prints lines; `clock` has monotonic seconds.

    As a context manager it cancels a verification in another thread within a second on exit.
    """

    def __init__(
        self, show: Callable[[str], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._show = show
        self._clock = clock
        self._is_left = threading.Event()
        self._folder: Path | None = None
        self._start = self._next = 0.0

    def __enter__(self) -> "VerificationProgress":
        return self

    def __exit__(self, *_: object) -> None:
        self._is_left.set()

    def __call__(self, folder: Path, read: int, size: int) -> None:
        """Print a line if it is time; `read` and `size` are bytes read, and in all.

        Raises:
            VerificationEnded: the context was left.
        """
        if self._is_left.is_set():
            raise VerificationEnded
        now = self._clock()
        if folder != self._folder:
            self._folder, self._start, self._next = folder, now, now + FIRST_S
        if now < self._next:
            return
        self._next = now + EVERY_S
        done = read / max(size, 1)
        left = timedelta(seconds=round((now - self._start) * (1 / done - 1))) if read else "?"
        self._show(f"Verifying {folder}: {done:.0%} of {size / 2**30:,.1f} GiB, ETA {left}")


class ClusterVerification:
    """Verification on all nodes of a cluster, each hashing its share; a `Confirm` callback.

    `agents` has the nodes' probes once the process joined the cluster.
    """

    def __init__(self, agents: "Future[NodeProbes]") -> None:
        self._agents = agents

    def __call__(self, folder: Path, files: Mapping[str, FileRecord], watch: Watch) -> set[str]:
        """Return the names of files that are intact on a node."""
        size, read = sum(record.size for record in files.values()), 0
        while not self._agents.done():
            watch(folder, read, size)
            time.sleep(LOOK_S)
        agents, confirmed = self._agents.result(), set[str]()
        left = sorted(files, key=lambda name: files[name].size)
        while left:
            watch(folder, read, size)
            shares = {node: (folder, _share(left, files)) for node in agents.nodes}
            asked = {node: share for node, share in shares.items() if share[1]}
            for node, answer in agents.call_each(digests, asked, SHARE_S).items():
                records = answer.value or {}
                confirmed |= {name for name in records if records[name] == files[name]}
                read += sum(files[name].size for name in asked[node][1])
        done = f"{len(confirmed)} of {len(files)} files read by {len(agents.nodes)} nodes"
        log.info("%s: %s", folder, done)
        return confirmed


def _share(left: list[str], files: Mapping[str, FileRecord]) -> list[str]:
    """Remove the largest files from `left`, up to SHARE_FILES or SHARE_BYTES."""
    share, taken = list[str](), 0
    while left and (len(share) < SHARE_FILES or taken + files[left[-1]].size <= SHARE_BYTES):
        share.append(left.pop())
        taken += files[share[-1]].size
    return share
