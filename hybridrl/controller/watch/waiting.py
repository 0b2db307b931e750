"""Wait for the results of all ranks, and attribute failures to the first one."""

import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import ray
from ray import ObjectRef
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError, RayTaskError

from hybridrl.config.errors import ConfigError
from hybridrl.controller.errors import RemoteError, WorkerError
from hybridrl.controller.placement import Host
from hybridrl.controller.watch.stall_detector import StallDetector

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


class Failure(NamedTuple):
    """Failure of one rank, which died or raised.

    Attributes:
        summary: the exception on one line.
        details: traceback, or Ray's message about the death.
        problems: problems of a ConfigError.
        phase: the rank's own phase if more specific than the driver's, else empty.
    """

    host: Host
    died: bool
    summary: str
    details: str
    problems: Sequence[str] = ()
    phase: str = ""

    @property
    def is_echo(self) -> bool:
        """True if the rank only reports the loss of another one."""
        text = self.summary.lower()
        return not self.died and any(echo in text for echo in ECHOES)


def wait_for_all(
    hosts: Sequence[Host], refs: Sequence[ObjectRef], phase: str, detector: StallDetector
) -> list[Any]:
    """Return the results of a call on all hosts, in order; the detector looks every second.

    Raises:
        ConfigError: a worker raised a ConfigError.
        WorkerError: a worker raised or died; at once unless it only echoes another failure. Or
            the call has stalled.
    """
    waiting = dict(zip(refs, hosts, strict=True))
    results: dict[ObjectRef, Any] = {}
    failures: list[Failure] = []
    deadline = math.inf
    while waiting and time.monotonic() < deadline:
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=POLL_S)
        if not (ready or failures):
            detector.check(list(waiting.values()))
        for ref in ready:
            host = waiting.pop(ref)
            try:
                results[ref] = ray.get(ref)
            except RayError as error:
                failures.append(_failure(host, error, detector))
                if not failures[-1].is_echo:
                    _raise(failures[-1], phase)
                deadline = min(deadline, time.monotonic() + ROOT_CAUSE_GRACE_S)
    if failures:
        _raise(failures[0], phase)
    return [results[ref] for ref in refs]


def _failure(host: Host, error: RayError, detector: StallDetector) -> Failure:
    if isinstance(error, RayTaskError) and isinstance(error.cause, RemoteError):
        cause = error.cause
        return Failure(host, False, cause.summary, cause.trace, cause.problems, cause.phase)
    place = detector.last_place(host)
    where = f" {place}" if place else ""
    if isinstance(error, ActorDiedError):
        summary = f"its process died{where} (killed, out of memory, or a crash in native code)"
    elif isinstance(error, ActorUnavailableError):
        summary = f"its process or its node is lost or unreachable{where}"
    else:
        return Failure(host, False, type(error).__name__, str(error))
    return Failure(host, True, summary, str(error))


def _raise(failure: Failure, phase: str) -> None:
    if failure.problems:
        raise ConfigError(*failure.problems)
    host, phase = failure.host, failure.phase or phase
    raise WorkerError(
        [host.rank],
        phase,
        f"{host.describe()} failed in {phase}: {failure.summary}\n"
        f"{failure.details.rstrip()}\n{host.log_tail() if failure.died else ''}"
        f"Log: {host.log_file}",
    )
