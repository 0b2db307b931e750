"""Fingerprints of the models that a run reads, and changes of these.

Checkpoints hold only the trained weights. The reference, the base of adapters, the reward model
and teachers are read from their paths at each start. Not all bytes of the weights are read.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from hybridrl.config.checks.frozen_models import named_models
from hybridrl.config.choices import Init
from hybridrl.config.errors import ConfigError
from hybridrl.config.schema import ModelConfig, RunConfig
from hybridrl.models.resolve import model_folder, plain_folder, resolve_model

# Config key of the path -> file -> fingerprint.
Fingerprints = Mapping[str, Mapping[str, str]]

MODEL = "model.path"

# Files that transformers and vLLM read beside the weights; others only document the model.
_WHOLE = (
    *("config.json", "generation_config.json", "chat_template*", "tokenizer*", "tekken.json"),
    *("tokenization*.py", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.*", "merges.txt", "*.model"),
)
_WEIGHTS, _INDEX = (".safetensors", ".bin"), ".safetensors.index.json"
# These contain the version of transformers that wrote them.
_CONFIGS = ("config.json", "generation_config.json")
_VERSION = "transformers_version"
# Number and bytes of sampled blocks, spread evenly over a larger file of weights. Training that
# changes all weights changes nearly all blocks.
BLOCKS, BLOCK = 64, 64 * 2**10
_READERS = 8


def base_models(config: RunConfig) -> dict[str, dict[str, str]]:
    """Compute the fingerprints of all models' files that a run reads.

    Raises:
        ConfigError: a model does not exist, or a file cannot be read.
    """
    known = trained_model(config.model, weights=config.model.init is Init.pretrained)
    for model in named_models(config):
        folder = (resolve_model if model.has_weights else plain_folder)(model.path)
        known[model.key] = _of(model.key, model.path, folder, weights=model.has_weights)
    return known


def trained_model(model: ModelConfig, *, weights: bool) -> dict[str, dict[str, str]]:
    """Compute the fingerprints of the trained model's files; without `weights` none need exist."""
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


def fingerprint(folder: Path, *, weights: bool = True) -> dict[str, str]:
    """Return the SHA-256 of each file that transformers and vLLM read of a model, by name.

    Config, tokenizer and similar files are hashed whole. Of weights the size and sampled blocks are
    hashed. A change between two blocks is missed: in a file of 5 GB they are 80 MB apart.

    Raises:
        OSError: a file cannot be read.
    """
    whole = {path for pattern in _WHOLE for path in folder.glob(pattern)}
    sampled = set[Path]()
    if weights:
        by_format = (set(folder.glob(f"*{suffix}")) for suffix in _WEIGHTS)
        sampled = next(filter(None, by_format), sampled)
        whole |= set(folder.glob(f"*{_INDEX}"))
    files = sorted(path for path in whole | sampled if not path.is_dir())
    with ThreadPoolExecutor(_READERS) as pool:
        hashes = pool.map(lambda path: _sha256(path, is_sampled=path in sampled), files)
        return {path.name: sha256 for path, sha256 in zip(files, hashes, strict=True)}


def without_weights(known: Mapping[str, str]) -> dict[str, str]:
    """Drop the hashes of weights, as with `weights=False`."""
    ends = (*_WEIGHTS, _INDEX)
    return {name: sha256 for name, sha256 in known.items() if not name.endswith(ends)}


def _sha256(path: Path, *, is_sampled: bool) -> str:
    if path.name in _CONFIGS:
        return _sha256_of_config(path.read_bytes())
    size = path.stat().st_size
    starts: Iterable[int] = range(0, size, BLOCK)
    if is_sampled and size > BLOCKS * BLOCK:
        starts = ((size - BLOCK) * k // (BLOCKS - 1) for k in range(BLOCKS))
    content = hashlib.sha256(size.to_bytes(8, "big"))
    with path.open("rb") as file:
        for start in starts:
            file.seek(start)
            content.update(file.read(BLOCK))
    return content.hexdigest()


def _sha256_of_config(text: bytes) -> str:
    with suppress(ValueError):  # reported where the config is read
        config = json.loads(text)
        if isinstance(config, dict):
            config.pop(_VERSION, None)
        text = json.dumps(config, sort_keys=True).encode()
    return hashlib.sha256(text).hexdigest()
