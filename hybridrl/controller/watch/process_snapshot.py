"""What can be seen of processes of this node that do not answer: place, state, stacks, collectives.

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

# Seconds that processes get to write their stacks, at least and at most.
MIN_WRITING_S, MAX_WRITING_S = 0.5, 3.0
PY_SPY_TIMEOUT_S = 4.0
# A process that moves less than this between files and sockets is at rest.
TRAFFIC_STEP_BYTES = 16 * 2**20
STOPPED = "Tt"
# States of a process of which nothing runs any more; empty: there is none.
GONE = ("", "X", "Z")
# Where faulthandler begins a thread; the main one comes last.
_THREAD = re.compile(r'hread 0x.*\n  File "(.*)", line (\d+) in (.*)')


class ProcessSnapshot(NamedTuple):
    """A process from outside.

    Attributes:
        position: what it has published last; None if nothing, or if it is gone.
        state: the letter of /proc/<pid>/stat, "T" if it is stopped; empty if it is gone.
    """

    position: Position | None
    state: str


class Traces(NamedTuple):
    """What a process wrote of itself when it was asked.

    Attributes:
        frame: the innermost line of Python of its main thread, "wait (file.py:12)"; or why there
            is none; empty if it was not asked.
        records: files of its flight recorders.
        device: where its device is, "in bucket 17 of 24"; empty if it has nothing to do.
        passed: places of the phase that the device is done with; -1 if that is not known.
    """

    frame: str
    records: list[str]
    device: str = ""
    passed: int = -1


class ProgressCounters(NamedTuple):
    """Numbers that change while a process gets further.

    Attributes:
        changes: of its position.
        traffic: what it has read and written, in steps of TRAFFIC_STEP_BYTES: a rank that writes
            a large file alone stays in one place for long.
    """

    changes: int
    traffic: int


def process_snapshots(pids: Sequence[int]) -> list[ProcessSnapshot]:
    """Where processes are, and in which state."""
    return [ProcessSnapshot(_position(pid), state_of(pid)) for pid in pids]


def progress_counters(pids: Sequence[int]) -> list[ProgressCounters | None]:
    """How far processes are; None of one that publishes nothing."""
    found: list[ProgressCounters | None] = []
    for pid in pids:
        position = _position(pid)
        found.append(position and movement(pid, position))
    return found


def movement(pid: int, position: Position) -> ProgressCounters:
    """How far a process is, given its position."""
    return ProgressCounters(position.changes, _traffic_bytes(pid) // TRAFFIC_STEP_BYTES)


def state_of(pid: int) -> str:
    """The letter of a process's state; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger keeps a process from running."""
    state = state_of(pid)
    return bool(state) and state in STOPPED


def traces(pids: Sequence[int], ranks: Sequence[int], logs: Sequence[Path]) -> list[Traces]:
    """Have processes write the stacks of all threads to their logs, and their last collectives.

    Those that are stopped go on for it: what they hang in comes to nothing anyway.

    Args:
        pids: processes of a pool.
        ranks: of them.
        logs: where their output goes.
    """
    sizes = [_size(log) for log in logs]
    asked = [pid for pid in pids if _position(pid) is not None]  # others have no handlers yet
    for pid in asked:
        with suppress(ProcessLookupError):
            os.kill(pid, STACK_SIGNAL)
            os.kill(pid, RECORDER_SIGNAL)
            if is_stopped(pid):
                os.kill(pid, signal.SIGCONT)
    frames = _await_frames(logs, sizes) if asked else [""] * len(pids)
    silent = {
        pid: log
        for pid, log, frame in zip(pids, logs, frames, strict=True)
        if pid in asked and not frame
    }
    told = _spy(silent) if silent else ""
    frames = [told if pid in silent else frame for pid, frame in zip(pids, frames, strict=True)]
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
    """Bytes through files, pipes and sockets, as far as the kernel counts them."""
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
    """Let py-spy read the stacks of processes that cannot write them, and write them to their logs.

    Returns:
        What to tell of them.
    """
    program = shutil.which("py-spy")
    if program is None:
        return "it writes no stacks; with py-spy on PATH they would be read"
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
    return "it writes no stacks; py-spy's are in its log"
