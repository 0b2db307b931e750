"""Problems from JSONL and Parquet files, local or of data sets on the Hugging Face hub."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

from hybridrl.config.checks.data import file_problems
from hybridrl.config.command.input_errors import parse_json
from hybridrl.data.sources.rows import Columns, Problem, Row, problems_of
from hybridrl.data.sources.values import kind_of
from hybridrl.models.resolve import HUB_ERRORS, hub_snapshot

# Default folders, in order, of data sets with several folders.
DEFAULT_FOLDERS = ("main", "default", "data")


class Split(StrEnum):
    """Split of a data set, named as files on the hub are."""

    train = "train"
    held_out = "test"


# File name prefixes of each split, in order of preference.
_FILE_NAMES = {Split.train: ("train",), Split.held_out: ("test", "validation")}

# Not train_sft-00000-of-00001.parquet, a file of the split train_sft.
_IN_SPLIT = r"{}(?!\w+-\d+-of-)(\b|[-_.])"


def read_problems(
    key: str, paths: Sequence[Path], columns: Columns
) -> tuple[list[Problem], list[str]]:
    """Read problems of JSONL or Parquet files that config key `key` names; with messages."""
    problems, faults = list[Problem](), list[str]()
    for path in paths:
        if wrong := [str(problem) for problem in file_problems(key, str(path))]:
            faults += wrong
            continue
        try:
            rows = _read_jsonl(path) if path.suffix == ".jsonl" else _read_parquet(path)
        except ValueError as error:
            faults.append(f"{key} = {path}: {error}")
            continue
        good, wrong = problems_of(key, path, *rows, columns)
        problems += good
        faults += wrong
    if not problems and not faults:
        faults.append(f"{key} = {', '.join(map(str, paths)) or '[]'} has no problems.")
    return problems, faults


def _read_jsonl(path: Path) -> tuple[list[Row], list[str]]:
    with path.open("rb") as file:
        lines = ((f"{path}:{number}", line) for number, line in enumerate(file, start=1))
        return _each(((where, line) for where, line in lines if line.strip()), _json_object)


def _read_parquet(path: Path) -> tuple[list[Row], list[str]]:
    # Imported here: runs without Parquet files start faster.
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"not a readable Parquet file: {str(error).splitlines()[0]}") from error
    for index, field in enumerate(table.schema):
        # Some times have no Python value.
        if pyarrow.types.is_temporal(field.type) and not pyarrow.types.is_duration(field.type):
            with suppress(pyarrow.ArrowException):
                table = table.set_column(index, field.name, table[index].cast(pyarrow.string()))
    places = [f"{path} row {index}" for index in range(len(table))]
    try:
        return list(map(Row, places, table.to_pylist())), []
    except (ValueError, OverflowError, pyarrow.ArrowException):
        slices = ((where, table.slice(index, 1)) for index, where in enumerate(places))
        return _each(slices, lambda row: row.to_pylist()[0])


def _each(
    sources: Iterable[tuple[str, Any]], read: Callable[[Any], dict[str, Any]]
) -> tuple[list[Row], list[str]]:
    """Read rows one by one, each with its place; return rows and faults."""
    rows, faults = [], []
    for where, source in sources:
        try:
            rows.append(Row(where, read(source)))
        except UnicodeDecodeError as error:
            faults.append(f"{where}: not UTF-8 text: {error.reason} (byte {error.start})")
        except (ValueError, OverflowError, NotImplementedError) as error:
            faults.append(f"{where}: {error}")
    return rows, faults


def _json_object(line: bytes) -> dict[str, Any]:
    values = parse_json(line)
    if b"\\ud" in line.lower():
        try:
            json.dumps(values, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            surrogate = json.dumps(error.object[error.start]).strip('"')
            raise ValueError(f"not Unicode text: a lone surrogate, {surrogate}") from error
    if not isinstance(values, dict):
        raise ValueError(f"expected a JSON object, found {kind_of(values)}")
    return values


def hub_files(name: str, splits: Sequence[Split]) -> tuple[dict[Split, list[Path]], list[str]]:
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
            lambda cached: not files_by_split(name, cached, folder, splits)[1],
            repo_type="dataset",
        )
    except HUB_ERRORS as error:
        reason = str(error).strip().splitlines()
        return {}, [
            f"data.name = {name}: the data set is not in the local cache and cannot be downloaded "
            f"from the hub ({reason[0] if reason else type(error).__name__}).\n"
            f"Use local files (data.train_files=train.jsonl, .parquet too), a filled cache "
            f"(HF_HOME=<folder>), or the embedded problems (data=embedded)."
        ]
    return files_by_split(name, snapshot, folder, splits)


def files_by_split(
    name: str, snapshot: Path, folder: str, wanted: Sequence[Split] = tuple(Split)
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
    splits: dict[Split, list[Path]] = {}
    for split in wanted:
        prefixes = _FILE_NAMES[split]
        named = ([p for p in chosen if re.match(_IN_SPLIT.format(n), p.name)] for n in prefixes)
        splits[split] = next(filter(None, named), [])
    missing = [split.value for split, paths in splits.items() if not paths]
    if not missing:
        return splits, []
    keys = "data.train_files=..., " * (not splits[Split.train]) + "data.eval_files=..."
    return splits, [
        f"data.name = {name}: no Parquet file of its {' or '.join(missing)} split was found among "
        f"{', '.join(path.name for path in chosen) or 'no files at all'}.\n"
        f"Name the files: {keys}"
    ]
