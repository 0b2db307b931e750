"""Paths as users write them."""

import os
from pathlib import Path


def is_address(path: str) -> bool:
    """Whether a path is an address such as https://host/file, which nothing here opens."""
    return "://" in path


def expanded(path: str) -> Path:
    """A path with ~ replaced by a home directory, where there is one."""
    return Path(os.path.expanduser(path))  # Path.expanduser raises where there is none
