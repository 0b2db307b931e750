"""How a folder shows that `hybridrl export` wrote it."""

from pathlib import Path

# Says of what the folder is an export.
RECORD = "hybridrl_export.json"


def is_export(folder: Path) -> bool:
    """Whether a folder is one."""
    return (folder / RECORD).is_file()
