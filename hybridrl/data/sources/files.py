"""Problems from JSONL and Parquet files."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrl.config.checks.resources import file_problems
from hybridrl.config.command.user_files import parse_json
from hybridrl.data.sources.rows import Columns, Row, SourceProblem, kind_of, problems_of

if TYPE_CHECKING:
    import pyarrow


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
