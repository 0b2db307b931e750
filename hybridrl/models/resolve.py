"""model.path -> a local folder in Hugging Face format.

    embedded        the tiny model inside this package; embedded_moe, embedded_hybrid and
                    embedded_vision, those with experts, with recurrent layers, for images
    smollm2_135m    SmolLM2-135M-Instruct from its package (hybridrl/models/smollm2.py)
    a local path    used as it is; of a run's directory, the model that it trained
    anything else   a name on the hub: first its local cache, then a download

Functions that take a model raise ConfigError if it does not exist or cannot be fetched.
Imports neither torch nor transformers; only the first conversion of SmolLM2 does.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hybridrl.config.choices import Init
from hybridrl.config.command.input_errors import expanded, is_address, parse_json, reason_of
from hybridrl.config.errors import ConfigError, shown
from hybridrl.config.schema import ModelConfig
from hybridrl.models import smollm2
from hybridrl.models.weight_files import SINGLE, weight_files

EMBEDDED = "embedded"
_KINDS = ("moe", "hybrid", "vision")
_FOLDERS = {EMBEDDED: "tiny"} | {f"{EMBEDDED}_{kind}": f"tiny_{kind}" for kind in _KINDS}
EMBEDDED_FOLDERS = {name: Path(__file__).with_name(folder) for name, folder in _FOLDERS.items()}
EMBEDDED_FOLDER = EMBEDDED_FOLDERS[EMBEDDED]

# Files that transformers and vLLM need beside weights.
PLAIN_FILES = ["*.json", "*.jinja", "*.model", "*.py", "*.tiktoken", "*.txt"]
# A hub folder may hold the same weights in further formats.
_HUB_FILES = ["*.safetensors", *PLAIN_FILES]
# Errors of a download: HfHubHTTPError is an OSError, HFValidationError a ValueError, and a SOCKS
# proxy needs a further package.
HUB_ERRORS = (OSError, ValueError, ImportError)
_CONFIG = "config.json"
# Folder of the trained model in a run's directory.
FINAL = "final"
_WEIGHTS = (".safetensors", ".bin")
# A tokenizer's vocabulary is in one of these.
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
_WAYS_OUT = (
    "Three ways out:\n"
    "- model.path=/path/to/folder with config.json, *.safetensors and the tokenizer's files;\n"
    "  for hybridrl plan config.json is enough;\n"
    "- fill the cache where there is a connection (hf download <name>) and point HF_HOME to it;\n"
    "- model=embedded, the tiny model that comes with hybridrl."
)


def resolve_model(path: str) -> Path:
    """Return the absolute folder of a model.path, downloaded or converted if necessary."""
    return _folder(path, _HUB_FILES)


def model_folder(model: ModelConfig) -> Path:
    """Return the absolute folder of a model; with weights unless model.init=random."""
    if model.init is Init.random:
        return plain_folder(model.path)
    folder = resolve_model(model.path)
    if not any(file.suffix in _WEIGHTS for file in folder.iterdir()):
        raise ConfigError(
            f"model.path = {model.path}: {folder} has no weights ({' or '.join(_WEIGHTS)}).\n"
            f"Set model.init=random to train new ones, or name a folder that has some."
        )
    return folder


def name_or_folder(model: ModelConfig) -> str:
    """Return the name or path for libraries: the name on the hub, or the absolute folder."""
    return model.path if is_on_hub(model.path) else str(model_folder(model))


def plain_folder(path: str) -> Path:
    """Return the absolute folder of a model's config.json and tokenizer; weights may be missing."""
    return _folder(path, PLAIN_FILES)


def absolute_path(path: str) -> str:
    """Return `path` independent of the working directory: local folders as absolute paths."""
    known = path in (*EMBEDDED_FOLDERS, smollm2.NAME) or is_on_hub(path)
    return path if known else str(expanded(path).resolve())


def read_model_config(path: str) -> dict[str, Any]:
    """Return the model's config.json. Of a model on the hub only this file is fetched."""
    folder = _folder(path, [_CONFIG])
    try:
        return read_object(folder / _CONFIG)
    except ConfigError as error:
        raise ConfigError(f"model.path = {path}: {error.texts[0]}") from error


def takes_images(path: str) -> bool:
    """Return whether a model has a vision tower."""
    return "vision_config" in read_model_config(path)


def read_object(file: Path) -> dict[str, Any]:
    """Return the object of a JSON file.

    Raises:
        ConfigError: the file cannot be read, or is no JSON object.
    """
    try:
        content = parse_json(file.read_bytes())
    except (OSError, ValueError) as error:
        reason = str(error.strerror) if isinstance(error, OSError) else f"is {error}"
        raise ConfigError(f"{file} {reason}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} is not a JSON object")
    return content


def is_on_hub(path: str) -> bool:
    """Return whether `path` is a name on the hub."""
    return path not in (*EMBEDDED_FOLDERS, smollm2.NAME) and not _is_local(path)


def _folder(path: str, files: list[str]) -> Path:
    """Return the absolute folder of a model; of one on the hub, with `files`."""
    if path in EMBEDDED_FOLDERS:
        return EMBEDDED_FOLDERS[path]
    if path == smollm2.NAME:
        return smollm2.converted_folder()
    return _local_folder(path) if _is_local(path) else _hub_folder(path, files)


def _is_local(path: str) -> bool:
    """Return whether `path` is local; hub names are `name` or `owner/name`."""
    looks_local = path.startswith(("/", "./", "../", "~")) or path.count("/") > 1 or path == "."
    return looks_local or path.endswith("/") or os.path.exists(path)


def _local_folder(path: str) -> Path:
    if is_address(path):
        raise _no_model(path, "an address, not a folder or a name such as Qwen/Qwen2.5-0.5B")
    try:
        folder = expanded(path).resolve()
        if not (folder / _CONFIG).is_file() and (folder / FINAL / _CONFIG).is_file():
            folder /= FINAL
        exists, is_folder = folder.exists(), folder.is_dir()
        has_config = (folder / _CONFIG).is_file()
    except (OSError, ValueError) as error:
        raise _no_model(shown(path), f"it cannot be read: {reason_of(error)}") from error
    if not is_folder:
        what = "is a file, not a folder" if exists else "does not exist"
        raise _no_model(path, f"{folder} {what}")
    if not has_config:
        raise _no_model(
            path,
            f"{folder} has no {_CONFIG}; if it is the directory of a run that has not ended, "
            f"`hybridrl export {path} <folder>` writes the model of its newest checkpoint",
        )
    return folder


def _no_model(path: str, reason: str) -> ConfigError:
    return ConfigError(f"model.path = {path}: {reason}.\n{_WAYS_OUT}")


def hub_snapshot(
    name: str,
    patterns: list[str],
    is_complete: Callable[[Path], bool],
    repo_type: str | None = None,
) -> Path:
    """Return the cached files of a repository on the hub, downloaded unless they are complete.

    Raises:
        HUB_ERRORS: they cannot be fetched.
    """
    from huggingface_hub import errors, snapshot_download  # takes as long as all other imports here

    fetch = partial(snapshot_download, name, repo_type=repo_type, allow_patterns=patterns)
    try:
        cached = Path(fetch(local_files_only=True))
        if is_complete(cached):
            return cached
    except (FileNotFoundError, errors.HFValidationError):
        # Not cached, or no valid name: the second call reports which.
        pass
    return Path(fetch())


def _hub_folder(name: str, files: list[str]) -> Path:
    """Return the cached snapshot of a hub model, downloaded only if the cache lacks `files`."""
    try:
        folder = hub_snapshot(name, files, lambda cached: _is_complete(cached, files))
    except HUB_ERRORS as error:
        reason = str(error).strip().split("\n")[0]
        raise _no_model(
            name,
            "no such local folder, not in the Hugging Face cache, and the hub does not give it "
            f"({type(error).__name__}: {reason})",
        ) from error
    if not _is_complete(folder, files):
        lacks = "tokenizer" if files == PLAIN_FILES else "*.safetensors"
        raise _no_model(name, f"no {_CONFIG} or {lacks} there")
    return folder


def _is_complete(folder: Path, files: list[str]) -> bool:
    """Return whether a snapshot has its config and the tokenizer or all weights in `files`."""
    if files == PLAIN_FILES and not any((folder / name).is_file() for name in VOCABULARIES):
        return False
    wanted = {_CONFIG}
    if "*.safetensors" in files:
        try:
            wanted |= {file.name for file in weight_files(folder)} or {SINGLE}
        except (OSError, ValueError):
            return False
    return all((folder / file).is_file() for file in wanted)
