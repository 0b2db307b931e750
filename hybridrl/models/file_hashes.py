"""Hashes of a model's files, without reading all of its weights."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

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


def fingerprint(folder: Path, *, weights: bool = True) -> dict[str, str]:
    """Return the SHA-256 of each file that transformers and vLLM read of a model, by name.

    `weights` is false where they are drawn at random.

    Config, tokenizer and similar files are hashed whole. Of weights the size and sampled blocks are
    hashed, so a change between two blocks is missed: in a file of 5 GB blocks are 80 MB apart.

    Raises:
        OSError: a file cannot be read.
    """
    whole = {path for pattern in _WHOLE for path in folder.glob(pattern)}
    sampled = set[Path]()
    if weights:
        sampled = _weight_files(folder)
        whole |= set(folder.glob(f"*{_INDEX}"))
    files = sorted(path for path in whole | sampled if not path.is_dir())
    with ThreadPoolExecutor(_READERS) as pool:
        found = pool.map(lambda path: _sha256(path, is_sampled=path in sampled), files)
        return {path.name: sha256 for path, sha256 in zip(files, found, strict=True)}


def without_weights(known: Mapping[str, str]) -> dict[str, str]:
    """Drop the hashes of weights, as with `weights=False`."""
    ends = (*_WEIGHTS, _INDEX)
    return {name: sha256 for name, sha256 in known.items() if not name.endswith(ends)}


def _weight_files(folder: Path) -> set[Path]:
    found = (set(folder.glob(f"*{suffix}")) for suffix in _WEIGHTS)
    return next(filter(None, found), set())


def _sha256(path: Path, *, is_sampled: bool) -> str:
    if path.name in _CONFIGS:
        return _sha256_of_config(path.read_bytes())
    size = path.stat().st_size
    content = hashlib.sha256(size.to_bytes(8, "big"))
    with path.open("rb") as file:
        for start in _block_starts(size) if is_sampled else range(0, size, BLOCK):
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


def _block_starts(size: int) -> Iterable[int]:
    if size <= BLOCKS * BLOCK:
        return range(0, size, BLOCK)
    return ((size - BLOCK) * k // (BLOCKS - 1) for k in range(BLOCKS))
