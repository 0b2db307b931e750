"""Snapshots of processes of this node: position, state, progress, stacks, last collectives.

Plain functions of one machine; `Nodes` runs them here or, for other nodes, as Ray tasks.
"""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hybridrl.controller.processes import STACK_SIGNAL
from hybridrl.controller.watch.flight_recorder import RECORDER_SIGNAL, records
from hybridrl.distributed.position import Position, open_position

# Seconds for processes to write their stacks, minimum and maximum.
MIN_WRITING_S, MAX_WRITING_S = 0.5, 3.0
PY_SPY_TIMEOUT_S = 4.0
# Less I/O than this does not count as progress.
TRAFFIC_STEP_BYTES = 16 * 2**20
STOPPED = "Tt"
# States of a process that has ended; empty: no such process.
GONE = ("", "X", "Z")
# A thread in faulthandler's output; the main thread comes last.
_THREAD = re.compile(r'hread 0x.*\n  File "(.*)", line (\d+) in (.*)')


class ProcessSnapshot(NamedTuple):
    """Position and state of a process.

    Attributes:
        position: last published position; None if there is none, or the process has ended.
        state: letter of /proc/<pid>/stat, "T" if stopped; empty if the process has ended.
    """

    position: Position | None
    state: str


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


class ProgressCounters(NamedTuple):
    """Counters that change while a process makes progress.

    Attributes:
        changes: number of changes of its position.
        traffic: bytes read and written, in units of TRAFFIC_STEP_BYTES. A rank that writes a
            large file keeps its position for long.
    """

    changes: int
    traffic: int


def process_snapshots(pids: Sequence[int]) -> list[ProcessSnapshot]:
    """Return position and state of processes."""
    return [ProcessSnapshot(_position(pid), state_of(pid)) for pid in pids]


def progress_counters(pids: Sequence[int]) -> list[ProgressCounters | None]:
    """Return the counters of processes; None for one that publishes no position."""
    found: list[ProgressCounters | None] = []
    for pid in pids:
        position = _position(pid)
        found.append(position and counters_at(pid, position))
    return found


def counters_at(pid: int, position: Position) -> ProgressCounters:
    """Return the counters of a process at a position."""
    return ProgressCounters(position.changes, _traffic_bytes(pid) // TRAFFIC_STEP_BYTES)


def state_of(pid: int) -> str:
    """Return the letter of a process's state; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_stopped(pid: int) -> bool:
    """Return True if a signal or a debugger has stopped a process."""
    state = state_of(pid)
    return bool(state) and state in STOPPED


def write_traces(pids: Sequence[int], ranks: Sequence[int], logs: Sequence[Path]) -> list[Traces]:
    """Make processes write the stacks of all threads to their logs, and their last collectives.

    Stopped processes are continued for this, because the call has already failed.

    Args:
        pids: processes of a pool.
        ranks: their ranks.
        logs: their log files.
    """
    sizes = [_size(log) for log in logs]
    signalled = [pid for pid in pids if _position(pid) is not None]  # others have no handler yet
    for pid in signalled:
        with suppress(ProcessLookupError):
            os.kill(pid, STACK_SIGNAL)
            os.kill(pid, RECORDER_SIGNAL)
            if is_stopped(pid):
                os.kill(pid, signal.SIGCONT)
    frames = _await_frames(logs, sizes) if signalled else [""] * len(pids)
    silent = {
        pid: log
        for pid, log, frame in zip(pids, logs, frames, strict=True)
        if pid in signalled and not frame
    }
    message = _spy(silent) if silent else ""
    frames = [message if pid in silent else frame for pid, frame in zip(pids, frames, strict=True)]
    found = []
    for pid, rank, log, frame in zip(pids, ranks, logs, frames, strict=True):
        files = [str(path) for path in records(log.parent, str(rank))]
        position = _position(pid)
        device = (position.device, position.passed) if position is not None else ("", -1)
        found.append(Traces(frame, files, *device))
    return found


def _position(pid: int) -> Position | None:
    reader = open_position(pid)
    if reader is None:
        return None
    try:
        return reader.read()
    finally:
        reader.close()


def _traffic_bytes(pid: int) -> int:
    """Return the bytes through files, pipes and sockets that the kernel counts."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    counts = dict(line.split(": ") for line in lines)
    return sum(int(counts.get(n, 0)) for n in ("rchar", "wchar", "read_bytes", "write_bytes"))


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _await_frames(logs: Sequence[Path], sizes: Sequence[int]) -> list[str]:
    start = time.monotonic()
    while True:
        time.sleep(MIN_WRITING_S)
        frames = [_innermost(log, size) for log, size in zip(logs, sizes, strict=True)]
        if all(frames) or time.monotonic() - start > MAX_WRITING_S:
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


def _spy(silent: Mapping[int, Path]) -> str:
    """Append stacks read by py-spy to the logs of processes that cannot write them.

    Returns:
        A remark for the report.
    """
    program = shutil.which("py-spy")
    if program is None:
        return "it writes no stacks; install py-spy to read them"
    running = []
    for pid, log in silent.items():
        with log.open("a") as file:
            command = [program, "dump", "--nonblocking", "--pid", str(pid)]
            running.append(subprocess.Popen(command, stdout=file, stderr=file))
    deadline = time.monotonic() + PY_SPY_TIMEOUT_S
    for process in running:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(deadline - time.monotonic(), 0.0))
        process.kill()
        process.wait()
    return "it writes no stacks; its log has those of py-spy"
