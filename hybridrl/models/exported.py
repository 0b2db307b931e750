"""How a folder shows that `hybridrl export` wrote it, and what of it."""

import json
from pathlib import Path

# Says of what the folder is an export, and which files belong to it.
RECORD = "hybridrl_export.json"


def is_export(folder: Path) -> bool:
    """Whether a folder is one."""
    return (folder / RECORD).is_file()


def in_between(folder: Path) -> tuple[Path, Path]:
    """Where an export is while it is written, and where the one that it replaces is set aside."""
    return folder.with_name(f".{folder.name}.partial"), folder.with_name(f".{folder.name}.replaced")


def files_in(folder: Path) -> list[str]:
    """Every file, link and empty folder below a folder, by its path in it, sorted."""
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_symlink() or not path.is_dir() or not any(path.iterdir())
    )


def added_to(export: Path) -> list[str]:
    """What lies in an export and is not of it, by its path; all of it if its record is damaged."""
    try:
        listed = json.loads((export / RECORD).read_text(encoding="utf-8"))["files"]
        ours = {RECORD, *listed}
    except (ValueError, KeyError, TypeError):
        ours = set()
    return [name for name in files_in(export) if name not in ours]
