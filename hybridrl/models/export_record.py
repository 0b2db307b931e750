"""Record in an exported folder: the files that `hybridrl export` wrote."""

import json
from pathlib import Path

# Provenance of the export, and its files.
RECORD = "hybridrl_export.json"


def is_export(folder: Path) -> bool:
    """Return whether a folder is an export."""
    return (folder / RECORD).is_file()


def in_between(folder: Path) -> tuple[Path, Path]:
    """Return the temporary folders of a new export and of the export that it replaces."""
    return folder.with_name(f".{folder.name}.partial"), folder.with_name(f".{folder.name}.replaced")


def files_in(folder: Path) -> list[str]:
    """Return the relative paths of all files, links and empty folders below a folder, sorted."""
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_symlink() or not path.is_dir() or not any(path.iterdir())
    )


def added_to(export: Path) -> list[str]:
    """Return the paths in an export that its record does not list; all if it is damaged."""
    try:
        listed = json.loads((export / RECORD).read_text(encoding="utf-8"))["files"]
        ours = {RECORD, *listed}
    except (ValueError, KeyError, TypeError):
        ours = set()
    return [name for name in files_in(export) if name not in ours]
