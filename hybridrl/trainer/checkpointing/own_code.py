"""Own code of a run: hashes of the files of rewards, environments, losses, workers and so on."""

import sys
from pathlib import Path

from hybridrl.checkpoint.verification import digest
from hybridrl.config.changes import own_leaves
from hybridrl.config.errors import ConfigError
from hybridrl.config.schema import RunConfig
from hybridrl.config.user_code.files import names_code, source_files
from hybridrl.trainer.tracking.provenance import plain

# Program and arguments of environment=agent_command.
COMMAND = "agent.args.command"
# Programs in these folders are not the user's. Larger files are data.
INSTALLED_IN = ("/usr", "/bin", sys.prefix)
CODE_BYTES = 16 * 2**20


def own_code(config: RunConfig) -> dict[str, dict[str, str]]:
    """Return the SHA-256 of each file of own code, by config key and file name.

    Modules that such a file imports from its folder count, too. Of an agent's command it is the
    program and the arguments that are files of the user's, up to CODE_BYTES.

    Raises:
        ConfigError: a file cannot be read.
    """
    hashes: dict[str, dict[str, str]] = {}
    for key, value in own_leaves(plain(config)).items():
        paths = [str(path) for path in (value if isinstance(value, list) else [value])]
        files = dict[str, Path]()
        if key == COMMAND:
            files = {path: Path(path) for path in paths if _is_own(Path(path))}
        elif names_code(key):
            files = {name: file for path in paths for name, file in source_files(path).items()}
        if files:
            try:
                hashes[key] = {name: digest(file).sha256 for name, file in files.items()}
            except OSError as error:
                raise ConfigError(
                    f"{key}: {error.filename} cannot be read: {error.strerror}."
                ) from error
    return hashes


def _is_own(path: Path) -> bool:
    """Return whether a part of a command is a file of the user's, and not a large one of data."""
    if not path.is_absolute() or any(path.is_relative_to(place) for place in INSTALLED_IN):
        return False
    return path.is_file() and path.stat().st_size <= CODE_BYTES
