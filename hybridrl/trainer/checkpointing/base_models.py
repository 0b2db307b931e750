"""Base models of a run: fingerprints of their files, and changes of these.

Checkpoints hold only the trained weights. The reference, the base of adapters and the reward model
are read from their paths at each start.
"""

from collections.abc import Mapping
from pathlib import Path

from hybridrl.config.choices import Init
from hybridrl.config.errors import ConfigError
from hybridrl.config.schema import ModelConfig, RunConfig
from hybridrl.models.file_hashes import fingerprint
from hybridrl.models.resolve import model_folder, plain_folder, resolve_model

# Config key of the path -> file -> fingerprint (models/file_hashes.py).
Fingerprints = Mapping[str, Mapping[str, str]]


MODEL, REWARD_MODEL = "model.path", "reward_model.model.path"


def base_models(config: RunConfig) -> dict[str, dict[str, str]]:
    """Compute the fingerprints of all models' files that a run reads.

    Raises:
        ConfigError: a model does not exist, or a file cannot be read.
    """
    reward = config.reward_model
    found = trained_model(config.model, weights=config.model.init is Init.pretrained)
    if reward is not None:
        path = reward.model.path
        found[REWARD_MODEL] = _of(REWARD_MODEL, path, resolve_model(path), weights=True)
    return found


def trained_model(model: ModelConfig, *, weights: bool) -> dict[str, dict[str, str]]:
    """Compute the fingerprints of the trained model's files; without `weights` none need exist.

    Raises:
        ConfigError: as `base_models`.
    """
    folder = model_folder(model) if weights else plain_folder(model.path)
    return {MODEL: _of(MODEL, model.path, folder, weights=weights)}


def other_files(before: Fingerprints, now: Fingerprints) -> dict[str, tuple[str, ...]]:
    """List files that were changed, added or removed, by key, for models in both."""
    changed = {
        key: tuple(sorted({name for name, _ in before[key].items() ^ now[key].items()}))
        for key in before.keys() & now.keys()
    }
    return {key: names for key, names in changed.items() if names}


def _of(key: str, path: str, folder: Path, *, weights: bool) -> dict[str, str]:
    try:
        return fingerprint(folder, weights=weights)
    except OSError as error:
        raise ConfigError(f"{key} = {path}: a file of it cannot be read: {error}") from error
