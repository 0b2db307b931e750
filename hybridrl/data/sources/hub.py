"""Data sets on the Hugging Face hub or in its cache: their Parquet files, without `datasets`."""

import re
from enum import StrEnum
from pathlib import Path

# A data set whose files lie in several folders; these are taken where the name does not say.
DEFAULT_FOLDERS = ("main", "default", "data")


class Split(StrEnum):
    """The two halves of a data set, by the names files have on the hub."""

    train = "train"
    held_out = "test"


# Data sets without a test split often have one of these.
_FILE_NAMES = {
    Split.train: ("train",),
    Split.held_out: ("test", "validation"),
}


def hub_files(name: str) -> tuple[dict[Split, list[Path]], list[str]]:
    """Parquet files of a data set by split, and problem texts where that fails.

    Args:
        name: `owner/name`, or `owner/name/folder` where a data set has several folders.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    owner, _, rest = name.partition("/")
    short, _, folder = rest.partition("/")
    if not short:
        return {}, [
            f"data.name = {name}: expected `embedded` or a data set on the hub (owner/name)."
        ]
    wanted = [f"{folder}/*.parquet" if folder else "*.parquet"]
    try:
        cached = snapshot_download(
            f"{owner}/{short}", repo_type="dataset", allow_patterns=wanted, local_files_only=True
        )
        splits, faults = files_by_split(name, Path(cached), folder)
        if not faults:
            return splits, []
    except (FileNotFoundError, HFValidationError):
        # Not cached, or no valid name: the second call finds out which, and says it.
        pass
    try:
        snapshot = snapshot_download(f"{owner}/{short}", repo_type="dataset", allow_patterns=wanted)
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        return {}, [_unreachable(name, error)]
    return files_by_split(name, Path(snapshot), folder)


def files_by_split(
    name: str, snapshot: Path, folder: str
) -> tuple[dict[Split, list[Path]], list[str]]:
    """The files of one folder below a downloaded data set by split, and problem texts."""
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
        f"Give the files yourself: data.train_files=..., data.eval_files=..."
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
        f"data.name = {name}: the data set is neither in the local cache nor to be had from the "
        f"hub ({reason[0] if reason else type(error).__name__}).\n"
        f"Three ways out: local files (data.train_files=train.jsonl, .parquet too), a filled cache "
        f"(HF_HOME=<folder>), or the embedded problems (data=embedded)."
    )
