"""Whether the files of a model are those that they were, without reading all of its weights."""

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hybridrl.models.resolve import PLAIN_FILES

# Of a larger file of weights so many blocks, spread evenly from its first byte to its last, stand
# for the whole: training changes nearly all of them.
BLOCKS, BLOCK = 64, 64 * 2**10
_READERS = 8


def fingerprint(folder: Path, *, weights: bool = True) -> dict[str, str]:
    """SHA-256 of what transformers and vLLM read of a model, by file name.

    Config, tokenizer and the like are hashed whole; of weights the size and sampled blocks, so that
    a change of a few bytes may go unseen.

    Args:
        folder: of the model.
        weights: whether they are read; false where they are drawn at random.

    Raises:
        OSError: a file cannot be read.
    """
    whole = {path for pattern in PLAIN_FILES for path in folder.glob(pattern)}
    sampled = _weight_files(folder) if weights else set()
    files = sorted(whole | sampled)
    with ThreadPoolExecutor(_READERS) as pool:
        found = pool.map(lambda path: _sha256(path, is_sampled=path in sampled), files)
        return {path.name: sha256 for path, sha256 in zip(files, found, strict=True)}


def _weight_files(folder: Path) -> set[Path]:
    return set(folder.glob("*.safetensors")) or set(folder.glob("*.bin"))


def _sha256(path: Path, *, is_sampled: bool) -> str:
    size = path.stat().st_size
    content = hashlib.sha256(size.to_bytes(8, "big"))
    with path.open("rb") as file:
        for start in _block_starts(size) if is_sampled else range(0, size, BLOCK):
            file.seek(start)
            content.update(file.read(BLOCK))
    return content.hexdigest()


def _block_starts(size: int) -> Iterable[int]:
    if size <= BLOCKS * BLOCK:
        return range(0, size, BLOCK)
    return ((size - BLOCK) * k // (BLOCKS - 1) for k in range(BLOCKS))
