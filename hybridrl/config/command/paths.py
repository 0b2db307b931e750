"""Paths in configs and commands."""

import os
from pathlib import Path


def is_address(path: str) -> bool:
    """Return whether a path is an address such as https://host/file."""
    return "://" in path


def expanded(path: str) -> Path:
    """Return a path with ~ replaced by the home directory, if there is one."""
    return Path(os.path.expanduser(path))  # Path.expanduser raises if there is none
