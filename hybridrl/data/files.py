"""Problems from JSONL and Parquet files."""

import json
from collections.abc import Sequence
from pathlib import Path

from hybridrl.config.check_resources import file_problems
from hybridrl.data.rows import Columns, Row, SourceProblem, kind_of, problems_of


def read_problems(
    key: str, paths: Sequence[Path], columns: Columns
) -> tuple[list[SourceProblem], list[str]]:
    """The problems of all files, and what is wrong with the files, as texts for a ConfigError.

    Args:
        key: the config key that named the files, for the texts.
        paths: .jsonl or .parquet files.
        columns: where question, answer and what else is wanted stand.
    """
    problems: list[SourceProblem] = []
    faults: list[str] = []
    for path in paths:
        found, wrong = _read_file(key, path, columns)
        problems += found
        faults += wrong
    if not problems and not faults:
        faults.append(f"{key} = {', '.join(map(str, paths)) or '[]'}: there are no problems in it.")
    return problems, faults


def _read_file(key: str, path: Path, columns: Columns) -> tuple[list[SourceProblem], list[str]]:
    wrong = list(file_problems(key, str(path)))
    if wrong:
        return [], wrong
    rows, faults = _read_jsonl(path) if path.suffix == ".jsonl" else _read_parquet(path)
    return problems_of(key, path, rows, columns, faults)


def _read_jsonl(path: Path) -> tuple[list[Row], list[str]]:
    rows, faults = [], []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                values = json.loads(line.decode())
            except json.JSONDecodeError as error:
                faults.append(f"{where}: not JSON: {error.msg} (column {error.colno})")
                continue
            except UnicodeDecodeError as error:
                faults.append(f"{where}: not UTF-8 text: {error.reason} (byte {error.start})")
                continue
            if isinstance(values, dict):
                rows.append(Row(where, values))
            else:
                faults.append(f"{where}: expected a JSON object, found {kind_of(values)}")
    return rows, faults


def _read_parquet(path: Path) -> tuple[list[Row], list[str]]:
    # Imported here: runs on JSONL or embedded problems start without it.
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        return [], [f"{path}: not a readable Parquet file: {str(error).splitlines()[0]}"]
    return [Row(f"{path} row {index}", values) for index, values in enumerate(rows)], []
