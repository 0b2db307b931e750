"""Where things lie that are made once and kept: outside every run directory."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where converted models lie: $HYBRIDRL_CACHE, else ~/.cache/hybridrl."""
    chosen = os.environ.get("HYBRIDRL_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "hybridrl"
