"""Problems from JSONL and Parquet files, local or of data sets on the Hugging Face hub."""

import json
import re
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrl.config.checks.resources import file_problems
from hybridrl.config.command.user_files import parse_json
from hybridrl.data.sources.rows import Columns, Row, SourceProblem, kind_of, problems_of
from hybridrl.models.resolve import HUB_ERRORS, hub_snapshot

if TYPE_CHECKING:
    import pyarrow

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


def read_problems(
    key: str, paths: Sequence[Path], columns: Columns
) -> tuple[list[SourceProblem], list[str]]:
    """Read the problems of JSONL or Parquet files; return them and messages for a ConfigError.

    `key` is the config key that names the files.
    """
    problems: list[SourceProblem] = []
    faults: list[str] = []
    for path in paths:
        if wrong := list(file_problems(key, str(path))):
            faults += wrong
            continue
        read = _read_jsonl if path.suffix == ".jsonl" else _read_parquet
        found, wrong = problems_of(key, path, *read(path), columns)
        problems += found
        faults += wrong
    if not problems and not faults:
        faults.append(f"{key} = {', '.join(map(str, paths)) or '[]'} has no problems.")
    return problems, faults


def _read_jsonl(path: Path) -> tuple[list[Row], list[str]]:
    rows, faults = [], []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                values = parse_json(line)
            except ValueError as error:
                faults.append(f"{where}: {error}")
                continue
            if b"\\ud" in line.lower() and (surrogate := _lone_surrogate(values)):
                faults.append(f"{where}: not Unicode text: a lone surrogate, {surrogate}")
            elif isinstance(values, dict):
                rows.append(Row(where, values))
            else:
                faults.append(f"{where}: expected a JSON object, found {kind_of(values)}")
    return rows, faults


def _lone_surrogate(values: Any) -> str:
    """Return the first unpaired surrogate as JSON escapes it; "" if there is none."""
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return json.dumps(error.object[error.start]).strip('"')
    return ""


def _read_parquet(path: Path) -> tuple[list[Row], list[str]]:
    # Imported here: runs without Parquet files start faster.
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        return [], [f"{path}: not a readable Parquet file: {str(error).splitlines()[0]}"]
    try:
        rows = table.to_pylist()
    except UnicodeDecodeError:
        return _rows_one_by_one(path, table)
    return [Row(f"{path} row {index}", values) for index, values in enumerate(rows)], []


def _rows_one_by_one(path: Path, table: "pyarrow.Table") -> tuple[list[Row], list[str]]:
    rows, faults = [], []
    for index in range(len(table)):
        where = f"{path} row {index}"
        try:
            (values,) = table.slice(index, 1).to_pylist()
            rows.append(Row(where, values))
        except UnicodeDecodeError as error:
            faults.append(f"{where}: not UTF-8 text: {error.reason} (byte {error.start})")
    return rows, faults


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
