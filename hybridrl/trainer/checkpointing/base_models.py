"""The models that a run takes from elsewhere: which files they have, and whether these changed.

Checkpoints hold the trained weights alone. The reference, what adapters are added to, and the
reward model are read from their paths again by each start.
"""

from collections.abc import Mapping
from pathlib import Path

from hybridrl.config.choices import Init
from hybridrl.config.errors import ConfigError
from hybridrl.config.schema import ModelConfig, RunConfig
from hybridrl.models.file_hashes import fingerprint
from hybridrl.models.resolve import model_folder, plain_folder, resolve_model

# By file (models/file_hashes.py), by the config's key of the path.
Fingerprints = Mapping[str, Mapping[str, str]]


MODEL, REWARD_MODEL = "model.path", "reward_model.model.path"


def base_models(config: RunConfig) -> dict[str, dict[str, str]]:
    """Fingerprints of all that a run reads of models' files.

    Raises:
        ConfigError: there is no such model, or a file of it cannot be read.
    """
    reward = config.reward_model
    found = trained_model(config.model, weights=config.model.init is Init.pretrained)
    if reward is not None:
        path = reward.model.path
        found[REWARD_MODEL] = _of(REWARD_MODEL, path, resolve_model(path), weights=True)
    return found


def trained_model(model: ModelConfig, *, weights: bool) -> dict[str, dict[str, str]]:
    """Fingerprints of the files of the model that is trained.

    Args:
        model: it.
        weights: whether its weights are read, too; else they need not be there.

    Raises:
        ConfigError: as `base_models`.
    """
    folder = model_folder(model) if weights else plain_folder(model.path)
    return {MODEL: _of(MODEL, model.path, folder, weights=weights)}


def other_files(before: Fingerprints, now: Fingerprints) -> dict[str, tuple[str, ...]]:
    """The files that changed, came or went, by key: of models that a run had and has."""
    changed = {
        key: tuple(
            name
            for name in sorted(before[key].keys() | now[key].keys())
            if before[key].get(name) != now[key].get(name)
        )
        for key in before.keys() & now.keys()
    }
    return {key: names for key, names in changed.items() if names}


def _of(key: str, path: str, folder: Path, *, weights: bool) -> dict[str, str]:
    try:
        return fingerprint(folder, weights=weights)
    except OSError as error:
        raise ConfigError(f"{key} = {path}: a file of it cannot be read: {error}") from error
