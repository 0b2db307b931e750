"""Cache folder for files that are made once and shared by all runs."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder of converted models: $HYBRIDRL_CACHE, else ~/.cache/hybridrl."""
    chosen = os.environ.get("HYBRIDRL_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "hybridrl"
