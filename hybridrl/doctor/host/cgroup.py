"""What the cgroups (v1 and v2) of this process still allow: memory, cores, threads."""

from pathlib import Path
from typing import NamedTuple

from hybridrl.config.planner.cgroup import cgroups

ROOT = Path("/")
# A v1 group without a limit names a number near 2^63.
NO_LIMIT = 2**60


class Files(NamedTuple):
    """The names of a controller's files under one version of cgroups."""

    limit: str
    used: str


class Limit(NamedTuple):
    """A limit that a group sets.

    Attributes:
        group: its folder.
        limit: what all processes of the group may use.
        used: what they use.
    """

    group: str
    limit: int
    used: int

    @property
    def left(self) -> int:
        """What is left of it."""
        return max(0, self.limit - self.used)


class CgroupFacts(NamedTuple):
    """The narrowest limits of this process's groups and those around them; None: no limit.

    Attributes:
        memory: in bytes; page cache, which the kernel takes back, does not count as used.
        threads: processes and threads.
        cores: CPU time per time, from the quota.
    """

    memory: Limit | None
    threads: Limit | None
    cores: float | None


def cgroup_facts(root: Path = ROOT) -> CgroupFacts:
    """What is set now, for this process.

    Args:
        root: of the file system that /proc and /sys belong to.
    """
    memory = [limit for group in cgroups("memory", root) if (limit := _memory(group))]
    threads = [limit for group in cgroups("pids", root) if (limit := _threads(group))]
    cores = [quota for group in cgroups("cpu", root) if (quota := _cores(group))]
    return CgroupFacts(
        min(memory, key=lambda limit: limit.left, default=None),
        min(threads, key=lambda limit: limit.left, default=None),
        min(cores, default=None),
    )


def _memory(group: Path) -> Limit | None:
    v2, v1 = (
        Files("memory.max", "memory.current"),
        Files("memory.limit_in_bytes", "memory.usage_in_bytes"),
    )
    limit = _limit(group, v2) or _limit(group, v1)
    if limit is None:
        return None
    return limit._replace(used=max(0, limit.used - _page_cache(group)))


def _page_cache(group: Path) -> int:
    """Bytes of files that the kernel keeps in memory as long as nobody needs it."""
    stat = dict(line.split() for line in _text(group / "memory.stat").splitlines())
    prefix = "total_" if "total_inactive_file" in stat else ""  # v1: with the groups below
    return sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))


def _threads(group: Path) -> Limit | None:
    return _limit(group, Files("pids.max", "pids.current"))


def _cores(group: Path) -> float | None:
    quota, _, period = _text(group / "cpu.max").partition(" ")
    if not quota:
        quota = _text(group / "cpu.cfs_quota_us")
        period = _text(group / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _limit(group: Path, files: Files) -> Limit | None:
    limit, used = _text(group / files.limit), _text(group / files.used)
    if not limit.isdigit() or not used.isdigit() or int(limit) > NO_LIMIT:
        return None
    return Limit(str(group), int(limit), int(used))


def _text(file: Path) -> str:
    return file.read_text().strip() if file.is_file() else ""
