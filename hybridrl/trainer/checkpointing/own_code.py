"""Own code of a run: hashes of the files of rewards, environments, losses, workers and so on."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from hybridrl.config.changes import own_leaves
from hybridrl.config.errors import ConfigError
from hybridrl.config.schema import RunConfig
from hybridrl.config.user_code.files import names_code
from hybridrl.config.user_code.sources import source_files
from hybridrl.trainer.tracking.provenance import plain

# Program and arguments of environment=agent_command.
COMMAND = "agent.args.command"


def own_code(config: RunConfig) -> dict[str, dict[str, str]]:
    """Return the SHA-256 of each file of own code, by config key and file name.

    Modules beside such a file count if it imports them; of an agent's command, the arguments that
    are files.

    Raises:
        ConfigError: a file cannot be read.
    """
    found: dict[str, dict[str, str]] = {}
    for key, value in own_leaves(plain(config)).items():
        paths = [str(path) for path in (value if isinstance(value, list) else [value])]
        files = dict[str, Path]()
        if key == COMMAND:
            files = {Path(path).name: Path(path) for path in paths[1:] if Path(path).is_file()}
        elif names_code(key):
            files = {name: file for path in paths for name, file in source_files(path).items()}
        if files:
            found[key] = _hashes(key, files)
    return found


def _hashes(key: str, files: Mapping[str, Path]) -> dict[str, str]:
    try:
        return {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}
    except OSError as error:
        raise ConfigError(f"{key}: {error.filename} cannot be read: {error.strerror}.") from error
