"""Values of a row's columns by name; a ValueError says what is wrong with one."""

import math
from typing import Any

# Value of a column that is not there.
ABSENT = object()


def label_of(values: dict[str, Any], column: str) -> bool:
    """Return a column's label."""
    value = value_of(values, column)
    if value not in (True, False):  # 1 and 0, too
        raise ValueError(f"`{column}` is {kind_of(value)}, expected true or false")
    return bool(value)


def answer_of(values: dict[str, Any], column: str) -> str:
    """Return a column's text or number as text."""
    value = value_of(values, column)
    if type(value) not in (str, int, float) or not str(value).strip():
        raise ValueError(f"`{column}` is {kind_of(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"`{column}` is {value}")
    return str(value)


def number_of(values: dict[str, Any], column: str) -> float:
    """Return a column's number."""
    value = value_of(values, column)
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"`{column}` is {kind_of(value)}, expected a number")
    return number


def value_of(values: dict[str, Any], column: str) -> Any:
    """Return a column's value."""
    value = look_up(values, column)
    if value is ABSENT:
        raise ValueError(f"there is no `{column}`")
    return value


def look_up(values: dict[str, Any], column: str) -> Any:
    """Return a column's value, or ABSENT; a full match has precedence over a path with dots."""
    if column in values:
        return values[column]
    value: Any = values
    for part in column.split("."):
        value = value.get(part, ABSENT) if isinstance(value, dict) else ABSENT
    return value


def column_text(values: dict[str, Any], column: str) -> str:
    """Return a column's text; empty if there is none."""
    value = look_up(values, column)
    return value if isinstance(value, str) and value.strip() else ""


def column_names(values: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the names of all columns, with fields of structs as paths: a, b.c, b.d."""
    names = []
    for name, value in values.items():
        nested = isinstance(value, dict) and value
        names += column_names(value, f"{prefix}{name}.") if nested else [prefix + name]
    return names


def kind_of(value: Any) -> str:
    """Describe a value for messages."""
    if value in ([], {}) or (isinstance(value, str) and not value.strip()):
        return "empty"
    names = {bool: "true or false", int: "a number", float: "a number", str: "text"}
    names |= {list: "a list", dict: "an object", type(None): "null"}
    return names.get(type(value), f"a {type(value).__name__}")
