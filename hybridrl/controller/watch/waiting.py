"""Wait for the results of all ranks, with a deadline, and attribute failures to the first one."""

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

# After a failure that only echoes another rank's, seconds to wait for the original.
ROOT_CAUSE_GRACE_S = 5.0
# Maximum uninterrupted wait, for signals and deadlines.
POLL_S = 1.0
# Maximum seconds that count between two polls: more means that the driver was suspended.
LONGEST_GAP_S = 60.0
# Name of threads with calls that may block for ever.
MAY_BLOCK = "may block"
LOG_TAIL_LINES = 25
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


class Host(NamedTuple):
    """Process of one rank, as known to the driver."""

    rank: int
    handle: ActorHandle
    slot: Slot
    pid: int
    node_name: str
    log_file: Path

    def describe(self) -> str:
        """Describe rank, node and process; Ray's id distinguishes nodes with one host name."""
        node = f"{self.node_name} ({self.slot.node_ip}, node {self.slot.node_id[:8]})"
        where = f"{node}, slot {self.slot.local_rank}, pid {self.pid}"
        return f"rank {self.rank} on {where}"


def by_node(hosts: Sequence[Host]) -> dict[str, list[Host]]:
    """Group ranks by the id of their node."""
    nodes: dict[str, list[Host]] = {}
    for host in hosts:
        nodes.setdefault(host.slot.node_id, []).append(host)
    return nodes


class CallMonitor(Protocol):
    """Monitor of ranks during a call."""

    def check(self, busy: Sequence[Host]) -> None:
        """Check the unfinished ranks, about every second; may raise."""

    def last_place(self, host: Host) -> str:
        """Return the last position of a dead rank, "in bucket 17 of 24"; empty if unknown."""


class Failure(NamedTuple):
    """Failure of one rank.

    Attributes:
        host: the rank.
        died: True if its process died; False if it raised.
        summary: the exception on one line.
        details: traceback, or Ray's message about the death.
        problems: problems of a ConfigError.
        phase: the rank's own phase if more specific than the driver's, else empty.
    """

    host: Host
    died: bool
    summary: str
    details: str
    problems: list[str]
    phase: str = ""

    @property
    def is_echo(self) -> bool:
        """True if the rank only reports the loss of another one."""
        text = self.summary.lower()
        return not self.died and any(echo in text for echo in ECHOES)


def wait_for_all(
    hosts: Sequence[Host],
    refs: Sequence[ObjectRef],
    phase: str,
    timeout_s: float,
    monitor: CallMonitor,
) -> list[Any]:
    """Return the results of all hosts, in order.

    Args:
        hosts: the called hosts.
        refs: the call on each host.
        phase: name for messages, "actor.update".
        timeout_s: seconds until all must have answered, or infinity.
        monitor: checked about every second; its exceptions propagate.

    Raises:
        ConfigError: a worker raised a ConfigError.
        WorkerError: a worker raised or died; at once unless it only echoes another failure.
        TimeoutError: the deadline passed; its only argument is the list of busy hosts.
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
            monitor.check(list(waiting.values()))
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
        summary = f"its process or its node is lost or unreachable{where}"
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
    """Call a function that may block for ever, such as a control call of Ray.

    Without the head node, Ray's control calls wait a minute and then end the process.

    Raises:
        TimeoutError: the function has not returned in time. Its own exceptions propagate.
    """
    return run_in_background(function, name=MAY_BLOCK).result(timeout_s)


def join_abandoned_calls(timeout_s: float) -> None:
    """Wait at most `timeout_s` seconds for calls abandoned by `call_with_timeout`."""
    deadline = time.monotonic() + timeout_s
    for thread in threading.enumerate():
        if thread.name == MAY_BLOCK:
            thread.join(max(deadline - time.monotonic(), 0.0))


def log_tail(host: Host) -> str:
    """Return the last lines of a rank's log, with a final newline; empty if not on this node."""
    if not host.log_file.is_file():
        return ""
    lines = host.log_file.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    return f"Last lines of rank {host.rank}'s log:\n" + "".join(f"  | {line}\n" for line in lines)
