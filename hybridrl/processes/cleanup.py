"""Clean-up of processes without a supervisor, and of their shared memory, on one machine.

Plain functions; the controller runs them here or, for other nodes, as Ray tasks.
"""

import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

_logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
# A killed process that still exists after these seconds hangs in the kernel.
KILL_TIMEOUT_S = 2.0
POLL_S = 0.02
# A parent that reaps has done so after these seconds.
REAP_TIMEOUT_S = 1.0


class Footprint(NamedTuple):
    """Processes, as (id, creation time), and files under /dev/shm."""

    processes: list[tuple[int, float]]
    shared_memory: list[str]


def shared_memory_of(process: psutil.Process) -> list[str]:
    """Return the files under /dev/shm that a process maps and that are younger than it.

    They persist when all processes that map them are killed. Older files belong to others.
    """
    lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    paths = {"/" + line.partition("/")[2] for line in lines}
    started, own = process.create_time(), []
    for path in sorted(path for path in paths if path.startswith(f"{SHARED_MEMORY}/")):
        with suppress(FileNotFoundError):  # mapped but already unlinked
            status = os.stat(path)
            # File and process times have different resolutions.
            if status.st_uid == os.getuid() and status.st_ctime > started - 1.0:
                own.append(path)
    return own


def footprint(pids: list[int]) -> Footprint:
    """Return processes, with children, and shared memory of these process ids."""
    members, files = [], set[str]()
    for pid in pids:
        with suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            process = psutil.Process(pid)
            for member in (process, *process.children(recursive=True)):
                members.append((member.pid, member.create_time()))
            files.update(shared_memory_of(process))
    return Footprint(members, sorted(files))


def end(left: Footprint, shared_memory: list[str], grace_s: float) -> int:
    """Wait for processes, kill those that do not exit, and unlink their and more shared memory.

    Returns the number of killed processes.
    """
    alive = []
    for pid, created in left.processes:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.create_time() == created:
                alive.append(process)
    killed = wait_or_kill(alive, grace_s)
    for path in {*left.shared_memory, *shared_memory}:
        Path(path).unlink(missing_ok=True)
    return killed


def wait_or_kill(processes: list[psutil.Process], grace_s: float) -> int:
    """Wait `grace_s` seconds for processes, kill the rest; return their number."""
    alive = _wait(processes, grace_s)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    if left := _wait(alive, KILL_TIMEOUT_S):
        _logger.error("still running after SIGKILL: %s", ", ".join(map(str, left)))
    return len(alive)


def _wait(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait for processes, reap children of this one, and return those that still run.

    A zombie has ended, and is waited for only until its parent should have reaped it. In a
    container whose first process reaps none, it stays.
    """
    deadline = time.monotonic() + timeout_s
    while running := [p for p in processes if not _is_zombie(p)]:
        if time.monotonic() > deadline:
            return running
        _, processes = psutil.wait_procs(processes, timeout=POLL_S)
    psutil.wait_procs(processes, timeout=REAP_TIMEOUT_S)
    return []


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def marked_processes(variable: str, folder: Path) -> list[psutil.Process]:
    """Return this user's processes that were started with `variable` set to a folder.

    Some of Ray's processes overwrite their environment with a title, "ray::"; those have files open
    in the folder.
    """
    marked = []
    for process in psutil.process_iter(["environ", "name"]):
        if (process.info["environ"] or {}).get(variable) == str(folder):
            marked.append(process)
        elif (process.info["name"] or "").startswith("ray::"):
            with suppress(psutil.Error):  # exited, or another user's
                if any(file.path.startswith(f"{folder}/") for file in process.open_files()):
                    marked.append(process)
    return marked
