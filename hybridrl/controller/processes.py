"""Looking after worker processes on their own node: their end, their shared memory.

Plain functions of one machine; the pool runs them here or, for other nodes, as Ray tasks.
"""

import logging
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from hybridrl.config.choices import Accelerator

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
# What Ray's object store is to have there: room for a few steps' batches.
STORE_BYTES = {Accelerator.gpu: 2048 * 2**20, Accelerator.cpu: 256 * 2**20}
STACK_SIGNAL = signal.SIGUSR1
# Seconds after which a killed process that is still there will stay (it hangs in the kernel).
KILL_TIMEOUT_S = 2.0


class Footprint(NamedTuple):
    """Processes, as pairs of id and time of creation, and files under /dev/shm."""

    processes: list[tuple[int, float]]
    shared_memory: list[str]


def shared_memory_of(process: psutil.Process) -> list[str]:
    """Files under /dev/shm that the process maps and that were made in its lifetime.

    They stay behind when all processes that map them are killed. Older files are not the run's.
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
    # Times of files and processes come from clocks of different resolution.
    return status.st_uid == os.getuid() and status.st_ctime > since - 1.0


def footprint(pids: list[int]) -> Footprint:
    """What would be left if these processes of this machine were killed now."""
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


def end(left: Footprint, grace_s: float) -> list[int]:
    """Wait until processes are gone, kill those that are not, and unlink the shared memory.

    Args:
        left: what there is to end.
        grace_s: seconds they get to end by themselves.

    Returns:
        Processes that are still there.
    """
    alive = []
    for pid, created in left.processes:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.create_time() == created:
                alive.append(process)
    alive = wait_or_kill(alive, grace_s)
    for path in left.shared_memory:
        Path(path).unlink(missing_ok=True)
    return [process.pid for process in alive]


def wait_or_kill(processes: list[psutil.Process], grace_s: float) -> list[psutil.Process]:
    """Wait `grace_s` seconds for processes to end, kill the rest; return those still there."""
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    for process in alive:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    return psutil.wait_procs(alive, timeout=KILL_TIMEOUT_S)[1]


def of_ray(variable: str, folder: Path) -> list[psutil.Process]:
    """Processes of the Ray whose files are in a folder.

    They are known by the environment variable that has the folder's name as its value. Ray's agents
    write a title over their environment; they have files open in the folder.
    """
    marked = with_environment(variable, str(folder))
    known = {process.pid for process in marked}
    titled = [
        p for p in psutil.process_iter(["name"]) if (p.info["name"] or "").startswith("ray::")
    ]
    return marked + [p for p in titled if p.pid not in known and _has_open(p.pid, folder)]


def with_environment(name: str, value: str) -> list[psutil.Process]:
    """Processes of this user that were started with an environment variable of this value."""
    wanted = f"{name}={value}".encode()
    found = []
    for process in psutil.process_iter():
        try:
            if wanted in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                found.append(process)
        except OSError:
            continue  # gone meanwhile, or another user's
    return found


def _has_open(pid: int, folder: Path) -> bool:
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                if os.readlink(link).startswith(f"{folder}/"):
                    return True
    return False
