"""Cache folder for files that are made once and shared by all runs."""

import os
from pathlib import Path

from hybridrl.config.errors import ConfigError


def cache_folder() -> Path:
    """Return the folder of converted models: $HYBRIDRL_CACHE, else ~/.cache/hybridrl."""
    folder = os.path.expanduser(os.environ.get("HYBRIDRL_CACHE") or "~/.cache/hybridrl")
    if folder.startswith("~"):  # as of a container's user without an entry in /etc/passwd
        raise ConfigError(f"{folder}: there is no home directory.\nSet HYBRIDRL_CACHE=<a folder>.")
    return Path(folder)
