"""Paths and JSON files of the user."""

import json
import os
from pathlib import Path
from typing import Any

from hybridrl.config.command.input_errors import reason_of


def is_address(path: str) -> bool:
    """Return whether a path is an address such as https://host/file."""
    return "://" in path


def expanded(path: str) -> Path:
    """Return a path with ~ replaced by the home directory, if there is one."""
    return Path(os.path.expanduser(path))  # Path.expanduser raises if there is none


def parse_json(data: bytes) -> Any:
    """Return the value of JSON in UTF-8.

    Raises:
        ValueError: it is not JSON, or a number is too long, or it is nested too deeply.
    """
    try:
        return json.loads(data.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise ValueError(f"not JSON: {error.msg} ({at}column {error.colno})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text: {error.reason} (byte {error.start})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not readable as JSON: {reason_of(error)}") from error
