"""Rows that a function returns (data.function), called in a process of its own."""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hybridrl.config.errors import ConfigError, Problem
from hybridrl.config.user_code.classes import locate
from hybridrl.config.user_code.files import module_and_name
from hybridrl.config.user_code.importing import try_out

KEY = "data.function"


def files_of(path: str, args: Mapping[str, Any]) -> tuple[list[Path], list[Path] | None]:
    """Return files with the training and held-out rows of a function; None if it has none of these.

    Raises:
        ConfigError: it raises.
    """
    folder, name = _written(path, json.dumps(args)).name, module_and_name(KEY, path)[1]
    train, held_out = (Path(folder, split, f"{name}.jsonl") for split in ("train", "test"))
    return [train], [held_out] if held_out.exists() else None


@functools.cache  # data is read several times before a run; the files go with this process
def _written(path: str, args: str) -> "TemporaryDirectory[str]":
    folder = TemporaryDirectory(prefix="hybridrl_rows_")
    check, arguments = f"{__name__}.write_rows", (json.loads(args), folder.name)
    if problems := try_out(KEY, path, "its call", check, *arguments, always=True):
        raise ConfigError(*problems)
    return folder


def write_rows(key: str, path: str, args: dict[str, Any], folder: str) -> list[Problem]:
    """Call the function for each split and write the rows, in a trial's process."""
    function, name = locate(key, path), module_and_name(key, path)[1]
    for split in ("train", "test"):
        rows = function(split, **args)
        if rows is not None or split == "train":
            Path(folder, split).mkdir()
            lines = (f"{json.dumps(row)}\n" for row in rows or [])
            Path(folder, split, f"{name}.jsonl").write_text("".join(lines))
    return []
