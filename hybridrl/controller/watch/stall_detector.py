"""Notices while a call is waited for that nobody gets further."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress

import ray
from ray import ObjectRef
from ray.exceptions import RayError

from hybridrl.controller.node_tasks import NodeTasks
from hybridrl.controller.watch.clock import StoppedTimes, WatchClock
from hybridrl.controller.watch.process_snapshot import ProgressCounters, movement, progress_counters
from hybridrl.controller.watch.ray_monitor import RayMonitor
from hybridrl.controller.watch.stall_error import collect_report
from hybridrl.controller.watch.stall_report import StallReport, report
from hybridrl.controller.watch.waiting import Host, by_node
from hybridrl.distributed.position import PositionReader

logger = logging.getLogger(__name__)

# Seconds between two looks at other nodes, which cost a Ray task each; at most.
OTHER_NODES_EVERY_S = 30.0
# More than the seconds between two looks, unless other nodes are asked.
LOOK_S = 2.0


class Stalled(Exception):
    """No rank that has not answered got further for too long, or one of them cannot.

    Args:
        late: these ranks.
        what: of it, "nobody has got further".
    """

    def __init__(self, late: Sequence[Host], what: str) -> None:
        super().__init__(late)
        self.late = late
        self.what = what


class ProgressLog:
    """Since when each rank has been in one place. One of which nothing is heard is not still."""

    def __init__(self) -> None:
        # Rank -> how far it is, when that was seen first, and when last.
        self._seen: dict[int, tuple[ProgressCounters, float, float]] = {}

    def note(self, rank: int, movement: ProgressCounters, now: float) -> None:
        """Add what was seen of a rank at a time in seconds."""
        known = self._seen.get(rank)
        since = known[1] if known is not None and known[0] == movement else now
        self._seen[rank] = (movement, since, now)

    def seconds(self, ranks: Sequence[int]) -> float:
        """For how long none of these ranks has moved."""
        return min((self._still_s(rank) for rank in ranks), default=0.0)

    def _still_s(self, rank: int) -> float:
        if rank not in self._seen:
            return 0.0
        _, since, last = self._seen[rank]
        return last - since


class StallDetector:
    """Watches the ranks of a pool for the time of one call.

    Args:
        readers: of positions on this node, by rank.
        nodes: where the other ranks are.
        phase: the call, for the warning that is logged when half of the time has passed.
        num_ranks: all that were called.
        limit_s: seconds without movement that end the run; 0: none do.
        ray_monitor: whether Ray is there.
        tells_movement: whether ranks tell how far they are in the call. Of one in which they do
            not, it is known which of this node's are stopped by a signal.
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
        tells_movement: bool,
    ) -> None:
        self._readers = readers
        self._nodes = nodes
        self._phase = phase
        self._num_ranks = num_ranks
        self._limit_s = limit_s
        self._ray_monitor = ray_monitor
        self._has_warned = False
        self._stillness = ProgressLog()
        self._tells_movement = tells_movement
        self._stopped = StoppedTimes()
        self._every_s = min(OTHER_NODES_EVERY_S, limit_s / 4)
        self._clock = WatchClock(max(self._every_s, LOOK_S))
        self._asked: dict[ObjectRef, list[Host]] = {}
        self._asked_at = -float("inf")

    def look(self, busy: Sequence[Host]) -> None:
        """See whether any of these ranks has got further since the last look; takes no time.

        Raises:
            Stalled: none of them has, for too long.
            WorkerError: Ray is gone.
        """
        self._ray_monitor.check(self._phase)
        if not self._limit_s:
            return
        if self._tells_movement:
            self._look_for_movement(busy)
        else:
            self._look_for_stopped(busy)

    def last_place(self, host: Host) -> str:
        """Where a rank of this node was last, also if it is gone; empty if it is not known."""
        if host.rank not in self._readers:
            return ""
        position = self._readers[host.rank].read()
        return StallReport(self._phase, [], self._num_ranks).place(position)

    def _look_for_stopped(self, busy: Sequence[Host]) -> None:
        now = self._clock.now()
        for host in busy:
            is_here = host.rank in self._readers
            if is_here and self._stopped.seconds(host.pid, now) >= self._limit_s:
                raise Stalled(busy, f"rank {host.rank} has been stopped by a signal")

    def _look_for_movement(self, busy: Sequence[Host]) -> None:
        now = self._clock.now()
        for host in busy:
            if host.rank in self._readers:
                position = self._readers[host.rank].read()
                self._stillness.note(host.rank, movement(host.pid, position), now)
        self._look_elsewhere([host for host in busy if host.rank not in self._readers], now)
        ranks = [host.rank for host in busy]
        still_s = self._stillness.seconds(ranks)
        if still_s >= self._limit_s:
            self._ask_again(busy)
            if self._stillness.seconds(ranks) >= self._limit_s:
                raise Stalled(busy, "nobody has got further")
        if still_s >= self._limit_s / 2 and not self._has_warned:
            self._has_warned = True
            self._warn(busy, still_s)

    def _warn(self, busy: Sequence[Host], still_s: float) -> None:
        scene = collect_report(self._nodes, self._phase, busy, self._num_ranks)
        finding = f"nobody has got further in {self._phase} for {still_s:.0f} s"
        advice = f"The run ends when it has lasted for {self._limit_s:g} s."
        logger.warning("%s", report(scene, finding, advice))

    def _ask_again(self, busy: Sequence[Host]) -> None:
        """Have other nodes say where their ranks are now: what they have said is seconds old."""
        elsewhere = by_node([host for host in busy if host.rank not in self._readers])
        pids = {node_id: ([host.pid for host in hosts],) for node_id, hosts in elsewhere.items()}
        for node_id, found in self._nodes.run_each(progress_counters, pids).items():
            self._note(elsewhere[node_id], found)

    def _note(self, hosts: Sequence[Host], found: Sequence[ProgressCounters | None]) -> None:
        for host, moved in zip(hosts, found, strict=True):
            if moved is not None:
                self._stillness.note(host.rank, moved, self._clock.now())

    def _look_elsewhere(self, busy: Sequence[Host], now: float) -> None:
        """Note what other nodes have answered, and ask them again when it is time."""
        refs = list(self._asked)
        ready = ray.wait(refs, num_returns=len(refs), timeout=0)[0] if refs else []
        for ref in ready:
            with suppress(RayError):  # the node is gone, which the call itself will tell
                self._note(self._asked.pop(ref), ray.get(ref))
        if self._asked or now - self._asked_at < self._every_s:
            return
        self._asked_at = now
        for node_id, hosts in by_node(busy).items():
            with suppress(RayError):  # of a cluster whose head is gone, which another look tells
                ref = self._nodes.submit(node_id, progress_counters, [host.pid for host in hosts])
                self._asked[ref] = hosts
