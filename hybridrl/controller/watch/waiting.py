"""Waiting for all ranks to answer, with a deadline, and saying whose failure was the first."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError, RayTaskError

from hybridrl.config.errors import ConfigError
from hybridrl.controller.background import run_in_background
from hybridrl.controller.errors import RemoteError, WorkerError
from hybridrl.controller.placement import Slot
from hybridrl.controller.watch.clock import WatchClock

logger = logging.getLogger(__name__)

T = TypeVar("T")

# When the first failure seen is another rank's echo, seconds to wait for the failure behind it.
ROOT_CAUSE_GRACE_S = 5.0
# Longest uninterrupted wait, so that signals and deadlines are seen.
POLL_S = 1.0
# Of more between two polls, in which the driver was stopped itself, no more counts.
LONGEST_GAP_S = 60.0
# Of threads in which calls may block for ever.
MAY_BLOCK = "may block"
LOG_TAIL_LINES = 25
# How a rank that lost a partner in the middle of a collective says so (gloo, NCCL, TCPStore).
ECHOES = (
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "pair closure",
    "connection refused",
    "remote process exited",
    "ncclremoteerror",
)


class Host(NamedTuple):
    """The driver's knowledge of one rank's process."""

    rank: int
    handle: ActorHandle
    slot: Slot
    pid: int
    node_name: str
    log_file: Path

    def describe(self) -> str:
        """Rank, node and process, for messages; Ray's id tells nodes of one host name apart."""
        node = f"{self.node_name} ({self.slot.node_ip}, node {self.slot.node_id[:8]})"
        where = f"{node}, slot {self.slot.local_rank}, pid {self.pid}"
        return f"rank {self.rank} on {where}"


def by_node(hosts: Sequence[Host]) -> dict[str, list[Host]]:
    """Ranks by the id of their node."""
    nodes: dict[str, list[Host]] = {}
    for host in hosts:
        nodes.setdefault(host.slot.node_id, []).append(host)
    return nodes


class CallMonitor(Protocol):
    """Keeps an eye on ranks while they are waited for."""

    def look(self, busy: Sequence[Host]) -> None:
        """Called every second or so with those that have not answered; may raise."""

    def last_place(self, host: Host) -> str:
        """Where a rank that is gone was last, "in bucket 17 of 24"; empty if it is not known."""


class Failure(NamedTuple):
    """How one rank failed.

    Attributes:
        host: the rank.
        died: its process is gone; else it raised.
        summary: the exception on one line.
        details: traceback, or what Ray says of the death.
        problems: those of a ConfigError.
        phase: what it was doing, where it knows more than the driver; else empty.
    """

    host: Host
    died: bool
    summary: str
    details: str
    problems: list[str]
    phase: str = ""

    @property
    def is_echo(self) -> bool:
        """Whether the rank merely noticed that another one is gone."""
        text = self.summary.lower()
        return not self.died and any(echo in text for echo in ECHOES)


def wait_for_all(
    hosts: Sequence[Host],
    refs: Sequence[ObjectRef],
    phase: str,
    timeout_s: float,
    monitor: CallMonitor,
) -> list[Any]:
    """Every host's result, in order.

    Args:
        hosts: who was called.
        refs: the call on each.
        phase: for messages, "actor.update".
        timeout_s: seconds until all must have answered; infinite: there is no limit.
        monitor: what it raises leaves this.

    Raises:
        ConfigError: a worker found something the user can fix.
        WorkerError: a worker raised or died, as soon as it is known; of several failures the one
            that is not an echo of another's.
        TimeoutError: the deadline passed; its only argument is the list of hosts still busy.
    """
    clock, deadline = WatchClock(LONGEST_GAP_S), timeout_s
    waiting = dict(zip(refs, hosts, strict=True))
    results: dict[ObjectRef, Any] = {}
    failures: list[Failure] = []
    while waiting:
        left = max(deadline - clock.now(), 0.0)
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=min(left, POLL_S))
        if not (ready or left):
            break
        if not (ready or failures):
            monitor.look(list(waiting.values()))
        for ref in ready:
            host = waiting.pop(ref)
            try:
                results[ref] = ray.get(ref)
            except RayError as error:
                failures.append(_failure(host, error, monitor))
                if not failures[-1].is_echo:
                    _raise(failures[-1], phase)
                deadline = min(deadline, clock.now() + ROOT_CAUSE_GRACE_S)
    if failures:
        _raise(failures[0], phase)
    if waiting:
        raise TimeoutError(list(waiting.values()))
    return [results[ref] for ref in refs]


def _failure(host: Host, error: RayError, monitor: CallMonitor) -> Failure:
    if isinstance(error, RayTaskError) and isinstance(error.cause, RemoteError):
        cause = error.cause
        return Failure(host, False, cause.summary, cause.trace, cause.problems, cause.phase)
    place = monitor.last_place(host)
    where = f" {place}" if place else ""
    if isinstance(error, ActorDiedError):
        summary = f"its process died{where} (killed, out of memory, or a crash in native code)"
    elif isinstance(error, ActorUnavailableError):
        summary = f"its process or its node is gone or out of reach{where}"
    else:
        return Failure(host, False, type(error).__name__, str(error), [])
    return Failure(host, True, summary, str(error), [])


def _raise(failure: Failure, phase: str) -> None:
    if failure.problems:
        raise ConfigError(*failure.problems)
    host, phase = failure.host, failure.phase or phase
    raise WorkerError(
        [host.rank],
        phase,
        f"{host.describe()} failed in {phase}: {failure.summary}\n"
        f"{failure.details.rstrip()}\n{log_tail(host) if failure.died else ''}"
        f"Log: {host.log_file}",
    )


def call_with_timeout(timeout_s: float, function: Callable[[], T]) -> T:
    """What a function returns that may block for ever, as Ray's control calls do.

    Without their head node they wait a minute and then end the process.

    Raises:
        TimeoutError: it has not returned in time. What it raises itself leaves this too.
    """
    return run_in_background(function, name=MAY_BLOCK).result(timeout_s)


def join_abandoned_calls(timeout_s: float) -> None:
    """Wait until all that was given up (`call_with_timeout`) has come to its end, or for a time."""
    deadline = time.monotonic() + timeout_s
    for thread in threading.enumerate():
        if thread.name == MAY_BLOCK:
            thread.join(max(deadline - time.monotonic(), 0.0))


def log_tail(host: Host) -> str:
    """The last lines of a rank's log, if this node sees the file; ends with a newline or empty."""
    if not host.log_file.is_file():
        return ""
    lines = host.log_file.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    return f"Last lines of rank {host.rank}'s log:\n" + "".join(f"  | {line}\n" for line in lines)
