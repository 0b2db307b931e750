"""Worker processes and their shared memory on one machine: listing, killing, unlinking.

Plain functions; the pool runs them here or, for other nodes, as Ray tasks.
"""

import logging
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from hybridrl.config.choices import Accelerator

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
# Size of Ray's object store there: enough for the batches of a few steps.
STORE_BYTES = {Accelerator.gpu: 2048 * 2**20, Accelerator.cpu: 256 * 2**20}
STACK_SIGNAL = signal.SIGUSR1
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
    maps = Path(f"/proc/{process.pid}/maps")
    started = process.create_time()
    found = set()
    for line in maps.read_text().splitlines():
        path = line[line.find("/") :] if "/" in line else ""
        if path.startswith(f"{SHARED_MEMORY}/") and _is_ours(path, started):
            found.add(path)
    return sorted(found)


def _is_ours(path: str, since: float) -> bool:
    try:
        status = os.stat(path)
    except FileNotFoundError:  # mapped but already unlinked
        return False
    # File and process times have different resolutions.
    return status.st_uid == os.getuid() and status.st_ctime > since - 1.0


def footprint(pids: list[int]) -> Footprint:
    """Return processes, with children, and shared memory of these process ids."""
    found, files = [], set()
    for pid in pids:
        try:
            process = psutil.Process(pid)
            for member in (process, *process.children(recursive=True)):
                found.append((member.pid, member.create_time()))
            files.update(shared_memory_of(process))
        except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            continue
    return Footprint(found, sorted(files))


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
        logger.error("still running after SIGKILL: %s", ", ".join(map(str, left)))
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


def ray_processes(variable: str, folder: Path) -> list[psutil.Process]:
    """Return the processes of the Ray whose files are in a folder.

    They have an environment variable whose value is the folder. Some of Ray's processes overwrite
    their environment with a title; those have files open in the folder.
    """
    marked = with_environment(variable, str(folder))
    known = {process.pid for process in marked}
    titled = [
        p for p in psutil.process_iter(["name"]) if (p.info["name"] or "").startswith("ray::")
    ]
    return marked + [p for p in titled if p.pid not in known and _has_open(p, folder)]


def with_environment(name: str, value: str) -> list[psutil.Process]:
    """Return this user's processes that were started with this environment variable."""
    found = psutil.process_iter(["environ"])
    return [p for p in found if (p.info["environ"] or {}).get(name) == value]


def _has_open(process: psutil.Process, folder: Path) -> bool:
    with suppress(psutil.Error):  # exited, or another user's
        return any(file.path.startswith(f"{folder}/") for file in process.open_files())
    return False
