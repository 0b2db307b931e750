"""Snapshots of processes of this node: position, state, progress, stacks, last collectives.

Plain functions of one machine; `NodeTasks` runs them here or on other nodes.
"""

import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from hybridrl.controller.output import STACK_SIGNAL
from hybridrl.controller.watch.flight_recorder import RECORDER_SIGNAL, records
from hybridrl.distributed.position import Position, open_position
from hybridrl.processes.supervisor import stat_of

# Seconds for processes to write their stacks, minimum and maximum.
MIN_WRITING_S, MAX_WRITING_S = 0.5, 3.0
NO_STACKS = "it writes no stacks"
# Less I/O than this does not count as progress.
TRAFFIC_STEP_BYTES = 16 * 2**20
STOPPED = ("T", "t")
# States of a process that has ended; empty: no such process.
GONE = ("", "X", "Z")
# A thread in faulthandler's output; the main thread comes last.
_THREAD = re.compile(r'hread 0x.*\n  File "(.*)", line (\d+) in (.*)')


class Traces(NamedTuple):
    """Stack and flight records of a process, written on request.

    Attributes:
        frame: innermost Python line of its main thread, "wait (file.py:12)", or the reason for
            none; empty without a request.
        records: files of its flight recorders.
        device: position of its device, "in bucket 17 of 24"; empty if idle.
        passed: positions of the phase that the device has completed; -1 if unknown.
    """

    frame: str
    records: list[str]
    device: str = ""
    passed: int = -1


def process_snapshots(pids: Sequence[int]) -> list[tuple[Position | None, str]]:
    """Return position, None if unknown, and `state_of` each process."""
    return [(_position(pid), state_of(pid)) for pid in pids]


def progress_counters(pids: Sequence[int]) -> list[tuple[int, int] | None]:
    """Return the counters of processes; None for one that publishes no position."""
    positions = [_position(pid) for pid in pids]
    return [at and counters_at(pid, at) for pid, at in zip(pids, positions, strict=True)]


def counters_at(pid: int, position: Position) -> tuple[int, int]:
    """Return what changes while a process makes progress: changes of its position, and traffic.

    Traffic is read and written, in units of TRAFFIC_STEP_BYTES: a rank that writes a large file
    keeps its position for long.
    """
    traffic = 0
    with suppress(psutil.Error):
        io = psutil.Process(pid).io_counters()
        traffic = io.read_chars + io.write_chars + io.read_bytes + io.write_bytes
    return position.changes, traffic // TRAFFIC_STEP_BYTES


def state_of(pid: int) -> str:
    """Return the letter of a process's state in /proc/<pid>/stat; empty if it has ended."""
    return stat_of(pid)[0]


def is_stopped(pid: int) -> bool:
    """Return True if a signal or a debugger has stopped a process."""
    return state_of(pid) in STOPPED


def write_traces(pids: Sequence[int], ranks: Sequence[int], logs: Sequence[Path]) -> list[Traces]:
    """Make processes write the stacks of all threads to their logs, and their last collectives.

    Stopped processes are continued for this, because the call has already failed.
    """
    # Processes without a position have no handlers yet.
    asked = {pid: log for pid, log in zip(pids, logs, strict=True) if _position(pid) is not None}
    sizes = {log: log.stat().st_size if log.is_file() else 0 for log in asked.values()}
    for pid in asked:
        with suppress(ProcessLookupError):
            os.kill(pid, STACK_SIGNAL)
            os.kill(pid, RECORDER_SIGNAL)
            if is_stopped(pid):
                os.kill(pid, signal.SIGCONT)
    frames = _await_frames(sizes)
    traces = []
    for pid, rank, log in zip(pids, ranks, logs, strict=True):
        files = [str(path) for path in records(log.parent, str(rank))]
        position = _position(pid)
        device = (position.device, position.passed) if position is not None else ("", -1)
        silent = NO_STACKS if pid in asked else ""
        traces.append(Traces(frames.get(log) or silent, files, *device))
    return traces


def _position(pid: int) -> Position | None:
    reader = open_position(pid)
    if reader is None:
        return None
    try:
        return reader.read()
    finally:
        reader.close()


def _await_frames(sizes: Mapping[Path, int]) -> dict[Path, str]:
    """Return the innermost line in each log that was written after its size."""
    deadline = time.monotonic() + MAX_WRITING_S
    frames: dict[Path, str] = {}
    while not all(frames.get(log) for log in sizes) and time.monotonic() < deadline:
        time.sleep(MIN_WRITING_S)
        frames = {log: _innermost(log, size) for log, size in sizes.items()}
    return frames


def _innermost(log: Path, start: int) -> str:
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(start)
        threads = _THREAD.findall(file.read().decode(errors="replace"))
    if not threads:
        return ""
    path, line, function = threads[-1]
    return f"{function} ({Path(path).name}:{line})"


class WatchClock:
    """Clock that excludes suspension of this process.

    A scheduler suspends a whole job, so the polled processes make no progress either. Between two
    calls of `now`, at most `longest_gap_s` seconds count: more than between two polls.
    """

    def __init__(self, longest_gap_s: float) -> None:
        self._longest_gap_s = longest_gap_s
        self._asked_at = time.monotonic()
        self._seconds = 0.0

    def now(self) -> float:
        """Return the seconds since creation."""
        asked_at = time.monotonic()
        self._seconds += min(asked_at - self._asked_at, self._longest_gap_s)
        self._asked_at = asked_at
        return self._seconds


class Unchanged:
    """Durations for which values have stayed as they are, by an integer, such as a rank."""

    def __init__(self) -> None:
        # key -> value, seconds when it was seen first and last
        self._seen: dict[int, tuple[object, float, float]] = {}

    def note(self, key: int, value: object, now: float) -> float:
        """Add a value at a time in seconds; return the seconds since it changed."""
        known = self._seen.get(key)
        since = known[1] if known is not None and known[0] == value else now
        self._seen[key] = (value, since, now)
        return now - since

    def seconds(self, keys: Sequence[int]) -> float:
        """Return the seconds since the last change of any of these; 0 if one is unknown."""
        if not all(key in self._seen for key in keys):
            return 0.0
        seen = [self._seen[key] for key in keys]
        return min((last - since for _, since, last in seen), default=0.0)

    def seconds_stopped(self, pid: int, now: float) -> float:
        """Return the seconds since a process was first seen stopped by a signal, or 0."""
        stopped = is_stopped(pid)
        seconds = self.note(pid, stopped, now)
        return seconds if stopped else 0.0
