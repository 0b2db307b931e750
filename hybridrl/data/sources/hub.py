"""Parquet files of data sets on the Hugging Face hub or in its cache, without `datasets`."""

import re
from enum import StrEnum
from pathlib import Path

from hybridrl.models.resolve import HUB_ERRORS, hub_snapshot

# Default folders, in order, of data sets with several folders.
DEFAULT_FOLDERS = ("main", "default", "data")


class Split(StrEnum):
    """Split of a data set, named as files on the hub are."""

    train = "train"
    held_out = "test"


# File name prefixes of each split, in order of preference.
_FILE_NAMES = {
    Split.train: ("train",),
    Split.held_out: ("test", "validation"),
}


def hub_files(name: str) -> tuple[dict[Split, list[Path]], list[str]]:
    """Return the Parquet files of `owner/name[/folder]` by split; messages for a ConfigError."""
    owner, _, rest = name.partition("/")
    short, _, folder = rest.partition("/")
    if not short:
        return {}, [
            f"data.name = {name}: expected `embedded` or a data set on the hub (owner/name)."
        ]
    wanted = [f"{folder}/*.parquet" if folder else "*.parquet"]
    try:
        snapshot = hub_snapshot(
            f"{owner}/{short}",
            wanted,
            lambda cached: not files_by_split(name, cached, folder)[1],
            repo_type="dataset",
        )
    except HUB_ERRORS as error:
        return {}, [_unreachable(name, error)]
    return files_by_split(name, snapshot, folder)


def files_by_split(
    name: str, snapshot: Path, folder: str
) -> tuple[dict[Split, list[Path]], list[str]]:
    """Return the files of one folder of a downloaded data set by split, and messages."""
    files = sorted(snapshot.rglob("*.parquet"))
    folders = sorted({path.relative_to(snapshot).parent.as_posix() for path in files})
    if not folder and len(folders) > 1:
        usual = [candidate for candidate in DEFAULT_FOLDERS if candidate in folders]
        if not usual:
            return {}, [
                f"data.name = {name}: the data set has several folders: {', '.join(folders)}.\n"
                f"Name one: data.name={name}/{folders[0]}"
            ]
        folder = usual[0]
    chosen = [path for path in files if not folder or path.is_relative_to(snapshot / folder)]
    splits = {split: _of_split(chosen, names) for split, names in _FILE_NAMES.items()}
    missing = [split.value for split, paths in splits.items() if not paths]
    if not missing:
        return splits, []
    return splits, [
        f"data.name = {name}: no Parquet file of its {' or '.join(missing)} split was found among "
        f"{', '.join(path.name for path in chosen) or 'no files at all'}.\n"
        f"Name the files: data.train_files=..., data.eval_files=..."
    ]


def _of_split(files: list[Path], names: tuple[str, ...]) -> list[Path]:
    for name in names:
        found = [path for path in files if re.match(rf"{name}(\b|[-_.])", path.name)]
        if found:
            return found
    return []


def _unreachable(name: str, error: Exception) -> str:
    reason = str(error).strip().splitlines()
    return (
        f"data.name = {name}: the data set is not in the local cache and cannot be downloaded "
        f"from the hub ({reason[0] if reason else type(error).__name__}).\n"
        f"Use local files (data.train_files=train.jsonl, .parquet too), a filled cache "
        f"(HF_HOME=<folder>), or the embedded problems (data=embedded)."
    )
