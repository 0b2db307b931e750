"""Wait for the results of all ranks: the first failure, a stall or a deadline ends the wait."""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError, RayTaskError

from hybridrl.config.errors import ConfigError
from hybridrl.config.schema import ClusterConfig
from hybridrl.controller.errors import RemoteError, WorkerError
from hybridrl.controller.node_tasks import NodeTasks
from hybridrl.controller.placement import Host, by_node
from hybridrl.controller.watch.process_snapshot import (
    Unchanged,
    WatchClock,
    counters_at,
    progress_counters,
)
from hybridrl.controller.watch.ray_monitor import RayMonitor
from hybridrl.controller.watch.stall_report import (
    collect_report,
    format_report,
    place_in,
    stall_error,
)
from hybridrl.distributed.position import PositionReader

logger = logging.getLogger(__name__)

# After a failure that only echoes another rank's, seconds to wait for the original.
ROOT_CAUSE_GRACE_S = 5.0
# Maximum uninterrupted wait, for signals and deadlines.
POLL_S = 1.0
# Messages of gloo, NCCL and TCPStore after the loss of a peer in a collective.
ECHOES = (
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "pair closure",
    "connection refused",
    "remote process exited",
    "ncclremoteerror",
)
# Maximum seconds between two checks of other nodes, each of which is a Ray task.
OTHER_NODES_EVERY_S = 30.0
# More than the seconds between two checks of this node.
CHECK_S = 2.0
START_SETTING = "cluster.start_timeout_s"
STALL_SETTING = "cluster.stall_timeout_s"


class StallDetector:
    """Monitor of one call on the ranks of a pool.

    `readers` read the positions on this node, by rank. `is_step`: a step of the start, in which
    ranks publish no progress. It has a deadline; before it, only stopped ranks of this node are
    detected.
    """

    def __init__(
        self,
        cluster: ClusterConfig,
        readers: Mapping[int, PositionReader],
        nodes: NodeTasks,
        ray_monitor: RayMonitor,
        phase: str,
        num_ranks: int,
        *,
        is_step: bool,
    ) -> None:
        self._readers = readers
        self._nodes = nodes
        self._ray_monitor = ray_monitor
        self._phase = phase
        self._num_ranks = num_ranks
        self._deadline_s = cluster.start_timeout_s if is_step else None
        self._setting, self._limit_s = STALL_SETTING, cluster.stall_timeout_s
        # While roles are built, imports and compilers report little progress.
        is_building = phase.startswith("start: ") and not is_step
        if is_building and 0 < self._limit_s < cluster.start_timeout_s:
            self._setting, self._limit_s = START_SETTING, cluster.start_timeout_s
        self._has_warned = False
        # Progress by rank, and whether a process is stopped by its id. A rank without reports does
        # not count as stalled.
        self._progress, self._stopped = Unchanged(), Unchanged()
        self._every_s = min(OTHER_NODES_EVERY_S, self._limit_s / 4)
        self._clock = WatchClock(max(self._every_s, CHECK_S))
        self._read_at = -math.inf

    def check(self, busy: Sequence[Host]) -> None:
        """Check the unfinished ranks, without waiting; WorkerError if the call has stalled."""
        self._ray_monitor.check(self._phase)
        now = self._clock.now()
        if self._deadline_s is not None and now >= self._deadline_s:
            finding = f"{len(busy)} rank(s) did not finish {self._phase} within"
            self._raise(busy, finding, START_SETTING, self._deadline_s)
        if not self._limit_s:
            return
        if self._deadline_s is None:
            self._check_progress(busy, now)
        else:
            self._check_stopped(busy, now)

    def last_place(self, host: Host) -> str:
        """Return the last position of a rank of this node, also of a dead one, or ""."""
        reader = self._readers.get(host.rank)
        return "" if reader is None else place_in(self._phase, reader.read())

    def _raise(self, late: Sequence[Host], finding: str, setting: str, limit_s: float) -> None:
        self._ray_monitor.check_after_failure(self._phase)
        report = collect_report(self._nodes, self._phase, late, self._num_ranks)
        finding = f"{finding} {setting}={limit_s:g} s"
        raise stall_error(self._nodes, report, finding, f"If they are only slow, raise {setting}.")

    def _check_stopped(self, busy: Sequence[Host], now: float) -> None:
        for host in busy:
            is_here = host.rank in self._readers
            if is_here and self._stopped.seconds_stopped(host.pid, now) >= self._limit_s:
                finding = f"rank {host.rank} has been stopped by a signal in {self._phase} for"
                self._raise(busy, finding, self._setting, self._limit_s)

    def _check_progress(self, busy: Sequence[Host], now: float) -> None:
        for host in busy:
            if host.rank in self._readers:
                position = self._readers[host.rank].read()
                self._progress.note(host.rank, counters_at(host.pid, position), now)
        others = by_node([host for host in busy if host.rank not in self._readers])
        if now - self._read_at >= self._every_s:
            self._read_at = now
            self._read_other_nodes(others)
        ranks = [host.rank for host in busy]
        finding = f"no rank made progress in {self._phase} for"
        stalled_s = self._progress.seconds(ranks)
        if stalled_s >= self._limit_s:
            self._read_other_nodes(others)
            if self._progress.seconds(ranks) >= self._limit_s:
                self._raise(busy, finding, self._setting, self._limit_s)
        if stalled_s >= self._limit_s / 2 and not self._has_warned:
            self._has_warned = True
            report = collect_report(self._nodes, self._phase, busy, self._num_ranks)
            advice = f"The run ends after {self._limit_s:g} s without progress."
            logger.warning("%s", format_report(report, f"{finding} {stalled_s:.0f} s", advice))

    def _read_other_nodes(self, others: Mapping[str, list[Host]]) -> None:
        pids = {node_id: ([host.pid for host in hosts],) for node_id, hosts in others.items()}
        for node_id, counters in self._nodes.run_each(progress_counters, pids).items():
            for host, progress in zip(others[node_id], counters, strict=True):
                if progress is not None:
                    self._progress.note(host.rank, progress, self._clock.now())


class Death(RemoteError):
    """Death of a worker process, with Ray's message as its trace."""


def wait_for_all(
    refs: Sequence[ObjectRef],
    running: Mapping[ObjectRef, tuple[Host, str]],
    phase: str,
    detector: StallDetector,
) -> list[Any]:
    """Return the results of a call, in order; the detector looks every second.

    `running` has the host and the phase of these and of other calls that run now, whose failure
    ends the wait, too.

    Raises:
        ConfigError: a worker raised a ConfigError.
        WorkerError: a worker raised or died; at once unless it only echoes another failure. Or
            the call has stalled.
    """
    waiting: dict[ObjectRef, tuple[Host, str]] = {}
    done: set[ObjectRef] = set()
    results: dict[ObjectRef, Any] = {}
    failures: list[tuple[Host, RemoteError, str]] = []
    deadline = math.inf
    while (late := [ref for ref in refs if ref not in done]) and time.monotonic() < deadline:
        # Another thread may have begun calls, and forgets those that failed.
        waiting |= {ref: called for ref, called in [*running.items()] if ref not in done}
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=POLL_S)
        if not (ready or failures):
            detector.check([waiting[ref][0] for ref in late])
        for ref in ready:
            host, its_phase = waiting.pop(ref)
            done.add(ref)
            try:
                results[ref] = ray.get(ref)
            except RayError as error:
                cause = _cause(host, error, detector)
                failures.append((host, cause, its_phase))
                is_echo = any(echo in cause.summary.lower() for echo in ECHOES)
                if isinstance(cause, Death) or not is_echo:
                    _raise(host, cause, its_phase)
                deadline = min(deadline, time.monotonic() + ROOT_CAUSE_GRACE_S)
    if failures:
        _raise(*failures[0])
    return [results[ref] for ref in refs]


def _cause(host: Host, error: RayError, detector: StallDetector) -> RemoteError:
    if isinstance(error, RayTaskError) and isinstance(error.cause, RemoteError):
        return error.cause
    place = detector.last_place(host)
    where = f" {place}" if place else ""
    if isinstance(error, ActorDiedError):
        summary = f"its process died{where} (killed, out of memory, or a crash in native code)"
        return Death(summary, str(error), [], "")
    if isinstance(error, ActorUnavailableError):
        summary = f"its process or its node is lost or unreachable{where}"
        return Death(summary, str(error), [], "")
    return RemoteError(type(error).__name__, str(error), [], "")


def _raise(host: Host, cause: RemoteError, phase: str) -> None:
    if cause.problems:
        raise ConfigError(*cause.problems)
    phase = cause.phase or phase
    raise WorkerError(
        [host.rank],
        phase,
        f"{host.describe()} failed in {phase}: {cause.summary}\n{cause.trace.rstrip()}\n"
        f"{host.log_tail() if isinstance(cause, Death) else ''}Log: {host.log_file}",
    )
