"""Cgroups (v1 and v2) of this process."""

from collections.abc import Iterator
from pathlib import Path


def cgroups(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and its parents.

    Args:
        controller: memory, pids or cpu.
        root: of the file system with /proc and /sys.
    """
    listing = root / "proc/self/cgroup"
    for line in listing.read_text().splitlines() if listing.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / controller
        else:
            continue
        group = base / path.lstrip("/")
        # In a container the path may be the host's, of which only the root is mounted.
        for folder in (group, *group.parents):
            if not folder.is_relative_to(base):
                break
            if folder.is_dir():
                yield folder
