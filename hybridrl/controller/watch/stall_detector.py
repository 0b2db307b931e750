"""Stall detector: raises when no rank makes progress during a call."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress

import ray
from ray import ObjectRef
from ray.exceptions import RayError

from hybridrl.controller.node_tasks import NodeTasks
from hybridrl.controller.watch.clock import StoppedTimes, WatchClock
from hybridrl.controller.watch.process_snapshot import (
    ProgressCounters,
    counters_at,
    progress_counters,
)
from hybridrl.controller.watch.ray_monitor import RayMonitor
from hybridrl.controller.watch.stall_error import collect_report
from hybridrl.controller.watch.stall_report import StallReport, format_report
from hybridrl.controller.watch.waiting import Host, by_node
from hybridrl.distributed.position import PositionReader

logger = logging.getLogger(__name__)

# Maximum seconds between two checks of other nodes, each of which is a Ray task.
OTHER_NODES_EVERY_S = 30.0
# More than the seconds between two checks of this node.
CHECK_S = 2.0


class Stalled(Exception):
    """Stall: no unfinished rank made progress for too long, or one of them is stopped.

    Args:
        late: the unfinished ranks.
        what: finding, "no rank made progress".
    """

    def __init__(self, late: Sequence[Host], what: str) -> None:
        super().__init__(late)
        self.late = late
        self.what = what


class ProgressLog:
    """Time of the last progress of each rank. A rank without reports does not count as stalled."""

    def __init__(self) -> None:
        # rank -> counters, seconds when they were seen first and last
        self._seen: dict[int, tuple[ProgressCounters, float, float]] = {}

    def note(self, rank: int, counters: ProgressCounters, now: float) -> None:
        """Add the counters of a rank at a time in seconds."""
        known = self._seen.get(rank)
        since = known[1] if known is not None and known[0] == counters else now
        self._seen[rank] = (counters, since, now)

    def seconds(self, ranks: Sequence[int]) -> float:
        """Return the seconds since the last progress of any of these ranks."""
        return min((self._seconds_of(rank) for rank in ranks), default=0.0)

    def _seconds_of(self, rank: int) -> float:
        if rank not in self._seen:
            return 0.0
        _, since, last = self._seen[rank]
        return last - since


class StallDetector:
    """Monitor of one call on the ranks of a pool.

    Args:
        readers: readers of positions on this node, by rank.
        nodes: nodes of the other ranks.
        phase: the call, for the warning at half of the limit.
        num_ranks: number of called ranks.
        limit_s: seconds without progress that end the run; 0: no limit.
        ray_monitor: monitor of Ray's processes.
        reports_progress: True if ranks publish progress in the call. Else only ranks of this
            node that are stopped by a signal are detected.
    """

    def __init__(
        self,
        readers: Mapping[int, PositionReader],
        nodes: NodeTasks,
        phase: str,
        num_ranks: int,
        limit_s: float,
        ray_monitor: RayMonitor,
        *,
        reports_progress: bool,
    ) -> None:
        self._readers = readers
        self._nodes = nodes
        self._phase = phase
        self._num_ranks = num_ranks
        self._limit_s = limit_s
        self._ray_monitor = ray_monitor
        self._has_warned = False
        self._progress = ProgressLog()
        self._reports_progress = reports_progress
        self._stopped = StoppedTimes()
        self._every_s = min(OTHER_NODES_EVERY_S, limit_s / 4)
        self._clock = WatchClock(max(self._every_s, CHECK_S))
        self._requested: dict[ObjectRef, list[Host]] = {}
        self._requested_at = -float("inf")

    def check(self, busy: Sequence[Host]) -> None:
        """Check for progress of unfinished ranks since the last check, without waiting.

        Raises:
            Stalled: no rank made progress for too long.
            WorkerError: Ray is lost.
        """
        self._ray_monitor.check(self._phase)
        if not self._limit_s:
            return
        if self._reports_progress:
            self._check_progress(busy)
        else:
            self._check_stopped(busy)

    def last_place(self, host: Host) -> str:
        """Return the last position of a rank of this node, also of a dead one, or ""."""
        if host.rank not in self._readers:
            return ""
        position = self._readers[host.rank].read()
        return StallReport(self._phase, [], self._num_ranks).place(position)

    def _check_stopped(self, busy: Sequence[Host]) -> None:
        now = self._clock.now()
        for host in busy:
            is_here = host.rank in self._readers
            if is_here and self._stopped.seconds(host.pid, now) >= self._limit_s:
                raise Stalled(busy, f"rank {host.rank} has been stopped by a signal")

    def _check_progress(self, busy: Sequence[Host]) -> None:
        now = self._clock.now()
        for host in busy:
            if host.rank in self._readers:
                position = self._readers[host.rank].read()
                self._progress.note(host.rank, counters_at(host.pid, position), now)
        self._check_other_nodes([host for host in busy if host.rank not in self._readers], now)
        ranks = [host.rank for host in busy]
        stalled_s = self._progress.seconds(ranks)
        if stalled_s >= self._limit_s:
            self._read_other_nodes(busy)
            if self._progress.seconds(ranks) >= self._limit_s:
                raise Stalled(busy, "no rank made progress")
        if stalled_s >= self._limit_s / 2 and not self._has_warned:
            self._has_warned = True
            self._warn(busy, stalled_s)

    def _warn(self, busy: Sequence[Host], stalled_s: float) -> None:
        report = collect_report(self._nodes, self._phase, busy, self._num_ranks)
        finding = f"no rank made progress in {self._phase} for {stalled_s:.0f} s"
        advice = f"The run ends after {self._limit_s:g} s without progress."
        logger.warning("%s", format_report(report, finding, advice))

    def _read_other_nodes(self, busy: Sequence[Host]) -> None:
        """Read the counters on other nodes now: the last reports are seconds old."""
        others = by_node([host for host in busy if host.rank not in self._readers])
        pids = {node_id: ([host.pid for host in hosts],) for node_id, hosts in others.items()}
        for node_id, found in self._nodes.run_each(progress_counters, pids).items():
            self._note(others[node_id], found)

    def _note(self, hosts: Sequence[Host], found: Sequence[ProgressCounters | None]) -> None:
        for host, moved in zip(hosts, found, strict=True):
            if moved is not None:
                self._progress.note(host.rank, moved, self._clock.now())

    def _check_other_nodes(self, busy: Sequence[Host], now: float) -> None:
        """Add reports of other nodes, and request new ones when due."""
        refs = list(self._requested)
        ready = ray.wait(refs, num_returns=len(refs), timeout=0)[0] if refs else []
        for ref in ready:
            with suppress(RayError):  # node lost: the call itself will fail
                self._note(self._requested.pop(ref), ray.get(ref))
        if self._requested or now - self._requested_at < self._every_s:
            return
        self._requested_at = now
        for node_id, hosts in by_node(busy).items():
            with suppress(RayError):  # head lost: RayMonitor detects it
                ref = self._nodes.submit(node_id, progress_counters, [host.pid for host in hosts])
                self._requested[ref] = hosts
