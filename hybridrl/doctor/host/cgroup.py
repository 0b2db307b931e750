"""Probe of the limits that cgroups (v1 and v2) set for this process: memory, cores, threads."""

from pathlib import Path
from typing import NamedTuple

from hybridrl.config.planner.machine import cgroups

ROOT = Path("/")
# cgroup v1 shows "no limit" as a number near 2^63.
NO_LIMIT = 2**60
# Files of limit and usage in v2 and in v1.
MEMORY = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
THREADS = (("pids.max", "pids.current"),)


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


def cgroup_facts(root: Path = ROOT) -> CgroupFacts:
    """Read the limits of this process; `root` is the folder of proc and sys."""
    memory = [
        limit._replace(used=max(0, limit.used - _page_cache(group)))
        for group in cgroups("memory", root)
        for limit in _limits(group, MEMORY)
    ]
    threads = [limit for group in cgroups("pids", root) for limit in _limits(group, THREADS)]
    cores = [quota for group in cgroups("cpu", root) if (quota := _cores(group))]
    return CgroupFacts(
        min(memory, key=lambda limit: limit.left, default=None),
        min(threads, key=lambda limit: limit.left, default=None),
        min(cores, default=None),
    )


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


def _cores(group: Path) -> float | None:
    quota, _, period = _text(group / "cpu.max").partition(" ")
    if not quota:
        quota = _text(group / "cpu.cfs_quota_us")
        period = _text(group / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _text(file: Path) -> str:
    return file.read_text().strip() if file.is_file() else ""
