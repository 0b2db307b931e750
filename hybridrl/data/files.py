"""Problems from JSONL and Parquet files: columns mapped by name, every fault with file and line."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

# One chat message has at least these two texts.
Message = dict[str, str]

MAX_FAULTS_SHOWN = 3


@dataclass(frozen=True)
class SourceProblem:
    """One problem as a source holds it, not yet rendered.

    Attributes:
        prompt: the question, or a list of chat messages.
        answer: the solution or final answer.
        example: the whole row, with `answer` as mapped; what a reward function gets.
        tags: names of groups whose accuracy is reported apart, such as {"range": "unseen"}.
        where: `file:line` or the like, for messages.
    """

    prompt: str | list[Message]
    answer: str
    example: dict[str, Any]
    tags: dict[str, str]
    where: str

    @property
    def question(self) -> str:
        """The question, or of chat messages the last one of the user."""
        if isinstance(self.prompt, str):
            return self.prompt
        asked = [message["content"] for message in self.prompt if message["role"] == "user"]
        return asked[-1] if asked else self.prompt[-1]["content"]


class Columns(NamedTuple):
    """Which columns hold the question and the answer; a dot reaches into a struct."""

    prompt_key: str
    answer_key: str


class _Row(NamedTuple):
    where: str
    values: dict[str, Any]


class _Fault(ValueError):
    """What is wrong with a row or a value."""


def read_problems(
    key: str, paths: Sequence[Path], columns: Columns
) -> tuple[list[SourceProblem], list[str]]:
    """The problems of all files, and what is wrong with the files, as texts for a ConfigError.

    Args:
        key: the config key that named the files, for the texts.
        paths: .jsonl or .parquet files.
        columns: where question and answer stand.
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


def some_of(faults: Sequence[str]) -> str:
    """The first few of many faults, one a line, and how many more there are."""
    shown = list(faults[:MAX_FAULTS_SHOWN])
    if len(faults) > MAX_FAULTS_SHOWN:
        shown.append(f"... and {len(faults) - MAX_FAULTS_SHOWN} more")
    return "\n".join(shown)


def _read_file(key: str, path: Path, columns: Columns) -> tuple[list[SourceProblem], list[str]]:
    if path.is_dir():
        return [], [f"{key} = {path} is a folder. Name the .jsonl or .parquet files in it."]
    if not path.is_file():
        return [], [f"{key} = {path}: there is no such file (seen from {Path.cwd()})."]
    if path.suffix == ".jsonl":
        rows, faults = _read_jsonl(path)
    elif path.suffix == ".parquet":
        rows, faults = _read_parquet(path)
    else:
        return [], [f"{key} = {path}: expected a file that ends in .jsonl or .parquet."]
    missing = _missing_columns(key, path, rows, columns)
    if missing:
        return [], missing
    problems = []
    for row in rows:
        try:
            problems.append(_problem(row, columns))
        except _Fault as fault:
            faults.append(f"{row.where}: {fault}")
    if not faults:
        return problems, []
    return problems, [
        f"{key} = {path}: {len(faults)} row{'s' if len(faults) != 1 else ''} cannot be used.\n"
        f"{some_of(faults)}\n"
        f"A row needs text or chat messages in `{columns.prompt_key}` and text or a number in "
        f"`{columns.answer_key}`."
    ]


def _read_jsonl(path: Path) -> tuple[list[_Row], list[str]]:
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
                rows.append(_Row(where, values))
            else:
                faults.append(f"{where}: expected a JSON object, found {_kind(values)}")
    return rows, faults


def _read_parquet(path: Path) -> tuple[list[_Row], list[str]]:
    # Imported here: runs on JSONL or embedded problems start without it.
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        return [], [f"{path}: not a readable Parquet file: {str(error).splitlines()[0]}"]
    return [_Row(f"{path} row {index}", values) for index, values in enumerate(rows)], []


def _missing_columns(key: str, path: Path, rows: list[_Row], columns: Columns) -> list[str]:
    """A text for each mapped column that no row of the file has."""
    problems = []
    for name, column in zip(("prompt_key", "answer_key"), columns, strict=True):
        if not rows or any(_has(row.values, column) for row in rows):
            continue
        there = ", ".join(_column_names(rows[0].values))
        problems.append(
            f"data.{name} = {column}: {path} (from {key}) has no such column.\n"
            f"Its columns: {there}. Set data.{name} to one of them."
        )
    return problems


def _problem(row: _Row, columns: Columns) -> SourceProblem:
    """The row's problem.

    Raises:
        _Fault: a value is missing, empty or of a wrong type.
    """
    prompt = _prompt_of(_lookup(row.values, columns.prompt_key), columns.prompt_key)
    answer = _answer_of(_lookup(row.values, columns.answer_key), columns.answer_key)
    tagged = "tags" in row.values and isinstance(row.values["tags"], dict)
    tags = row.values["tags"] if tagged else {}
    return SourceProblem(
        prompt,
        answer,
        row.values | {"answer": answer},
        {name: str(value) for name, value in tags.items() if value is not None},
        row.where,
    )


def _prompt_of(value: Any, column: str) -> str | list[Message]:
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and value and all(_is_message(message) for message in value):
        return [{name: text for name, text in m.items() if text is not None} for m in value]
    if isinstance(value, list) and value:
        raise _Fault(f"`{column}` is a list, but not of messages with texts `role`, `content`")
    raise _Fault(f"`{column}` is {_kind(value)}")


def _answer_of(value: Any, column: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise _Fault(f"`{column}` is {_kind(value)}")
    if isinstance(value, str) and not value.strip():
        raise _Fault(f"`{column}` is {_kind(value)}")
    return str(value)


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and {"role", "content"} <= value.keys()
        and isinstance(value["role"], str)
        and isinstance(value["content"], str)
    )


def _lookup(values: dict[str, Any], column: str) -> Any:
    """The value of a column; the whole name counts before its parts at the dots.

    Raises:
        _Fault: the row has no such column.
    """
    if column in values:
        return values[column]
    found: Any = values
    for part in column.split("."):
        if not isinstance(found, dict) or part not in found:
            raise _Fault(f"there is no `{column}`")
        found = found[part]
    return found


def _has(values: dict[str, Any], column: str) -> bool:
    try:
        _lookup(values, column)
    except _Fault:
        return False
    return True


def _column_names(values: dict[str, Any], prefix: str = "") -> list[str]:
    """All names that reach a value, structs opened: a, b.c, b.d."""
    names = []
    for name, value in values.items():
        nested = isinstance(value, dict) and value
        names += _column_names(value, f"{prefix}{name}.") if nested else [prefix + name]
    return names


def _kind(value: Any) -> str:
    """What a value is, in a user's words."""
    if value is None:
        return "null"
    if isinstance(value, str | list | dict) and not (
        value.strip() if isinstance(value, str) else value
    ):
        return "empty"
    names = {bool: "true or false", int: "a number", float: "a number", str: "text"}
    names |= {list: "a list", dict: "an object"}
    return names[type(value)] if type(value) in names else f"a {type(value).__name__}"
