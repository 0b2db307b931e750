"""Wait for the results of all ranks, and attribute failures to the first one."""

import math
import time
from collections.abc import Sequence
from typing import Any

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


class Death(RemoteError):
    """Death of a worker process, with Ray's message as its trace."""


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
    failures: list[tuple[Host, RemoteError]] = []
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
                cause = _cause(host, error, detector)
                failures.append((host, cause))
                if isinstance(cause, Death) or not _is_echo(cause.summary):
                    _raise(host, cause, phase)
                deadline = min(deadline, time.monotonic() + ROOT_CAUSE_GRACE_S)
    if failures:
        _raise(*failures[0], phase)
    return [results[ref] for ref in refs]


def _is_echo(summary: str) -> bool:
    """Return True if a rank only reports the loss of another one."""
    return any(echo in summary.lower() for echo in ECHOES)


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
