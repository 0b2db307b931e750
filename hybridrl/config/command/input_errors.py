"""Paths and JSON of the user, and texts of the exceptions that wrong input raises."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import yaml
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from hybridrl.config.errors import shown

# Python raises ValueError for numbers of more digits than it reads, and for text that is not UTF-8.
INPUT_ERRORS = (
    HydraException,
    OmegaConfBaseException,
    yaml.YAMLError,
    OSError,
    ValueError,
    OverflowError,
    RecursionError,
)
# Part of Python's message for a number that is too long; it has no class of its own.
_DIGITS = "integer string conversion"
_RAISED = " raised while resolving interpolation: "


def reason_of(error: BaseException) -> str:
    """Return the reason of an input error: one line, or more if a library gives more."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, OSError) and error.strerror:
        named = f"{shown(error.filename)}: " if error.filename is not None else ""
        return f"{named}{error.strerror}"
    text = str(error).strip()
    if _DIGITS in text:
        return f"a number has more than {sys.get_int_max_str_digits():,} digits"
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 text: {error.reason} (byte {error.start})"
    if isinstance(error, OmegaConfBaseException):
        return _without_class(text.splitlines()[0])
    cause = error.__cause__ if isinstance(error, HydraException) else None
    return f"{text}\n{str(cause).strip()}" if cause is not None else text


def problem_of(error: BaseException) -> str:
    """Return an input error as a problem, with OmegaConf's config key if there is one."""
    at = error.full_key if isinstance(error, OmegaConfBaseException) else None
    return f"{at}: {reason_of(error)}" if at else reason_of(error)


def _without_class(text: str) -> str:
    """Return the message of a resolver's error, without the class that OmegaConf adds."""
    raised, separator, said = text.partition(_RAISED)
    return said.strip("\"'") if separator and raised.isidentifier() else text


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
