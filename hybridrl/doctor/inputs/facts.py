"""What a node has of models and data sets. Nothing is downloaded."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HFValidationError

from hybridrl.config.errors import ConfigError
from hybridrl.models import smollm2
from hybridrl.models.file_hashes import fingerprint
from hybridrl.models.resolve import EMBEDDED, absolute_path, plain_folder

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
WEIGHTS = (".safetensors", ".bin")
DATA = (".parquet", ".arrow", ".json", ".jsonl", ".csv", ".gz", ".zst")
READ = (WEIGHTS[0], ".json", ".jinja", ".model", ".txt")
LFS_POINTER = b"version https://git-lfs"
# A safetensors file begins with the length of its header, which no real one exceeds.
LENGTH_BYTES, MAX_HEADER_BYTES = 8, 100_000_000


class FolderFacts(NamedTuple):
    """A model's or data set's files on a node.

    Attributes:
        folder: where they are; of a hub's, the snapshot.
        files: bytes by name.
        faults: what is wrong with them.
        error: why there is no folder; empty if there is one.
        is_offline: whether HF_HUB_OFFLINE forbids to fetch what is not there.
        prints: fingerprints of what is read of a model that is whole, by name.
    """

    folder: str
    files: dict[str, int]
    faults: tuple[str, ...]
    error: str
    is_offline: bool = False
    prints: Mapping[str, str] | None = None


def is_on_hub(path: str) -> bool:
    """Whether model.path names a model on the hub."""
    made_here = path in (EMBEDDED, smollm2.NAME)
    return not made_here and absolute_path(path) == path and not Path(path).is_absolute()


def model_facts(path: str, needs_weights: bool) -> FolderFacts:
    """A model's folder, of whatever kind model.path is."""
    if is_on_hub(path):
        return hub_facts(path, "model", needs_weights)
    try:
        return folder_facts(plain_folder(path), needs_weights)
    except ConfigError as error:
        return FolderFacts("", {}, (), error.problems[0])


def hub_facts(name: str, kind: str, needs_weights: bool = False) -> FolderFacts:
    """The cached snapshot of a model or data set (`kind`)."""
    try:
        folder = snapshot_download(name, repo_type=kind, local_files_only=True)
    except (FileNotFoundError, HFValidationError):
        error = f"{name} is not in {constants.HF_HUB_CACHE}"
        return FolderFacts("", {}, (), error, constants.HF_HUB_OFFLINE)
    if kind == "model":
        return folder_facts(Path(folder), needs_weights)
    found = sorted(Path(folder).rglob("*.parquet"))
    sizes = {file.relative_to(folder).as_posix(): file.stat().st_size for file in found}
    return FolderFacts(folder, sizes, (), "")


def folder_facts(folder: Path, needs_weights: bool) -> FolderFacts:
    """The files of a model and what is wrong with them."""
    faults = [*_missing(folder, needs_weights), *_broken(folder)]
    prints = None if faults else fingerprint(folder, weights=needs_weights)
    return FolderFacts(str(folder), _sizes(folder), tuple(faults), "", prints=prints)


def lacks(name: str, kind: str, needs_weights: bool) -> bool:
    """Whether something of a hub's model or data set (`kind`) is still to be fetched."""
    try:
        folder = Path(snapshot_download(name, repo_type=kind, local_files_only=True))
    except (FileNotFoundError, HFValidationError):
        return True
    if kind == "model":
        return any(_missing(folder, needs_weights))
    return not any(path.suffix in DATA for path in folder.rglob("*"))


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of the files that a run reads; a hub's folder may hold the weights in other forms."""
    found = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    other = () if any(name.endswith(WEIGHTS[0]) for name in found) else WEIGHTS[1:]
    return {
        name: found[name]
        for name in sorted(found)
        if name.endswith((*READ, *other)) and not name.startswith((".", "pytorch_model.bin."))
    }


def _missing(folder: Path, needs_weights: bool) -> Iterator[str]:
    if not (folder / CONFIG).is_file():
        yield f"{CONFIG} is missing"
    if not needs_weights:
        return
    index = folder / INDEX
    if index.is_file():
        try:
            named = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError):
            yield f"{INDEX} is torn"
            return
        yield from (
            f"{name}, which {INDEX} names, is missing"
            for name in named
            if not (folder / name).is_file()
        )
    elif not any(path.suffix in WEIGHTS for path in folder.iterdir()):
        yield f"there are no weights ({' or '.join(WEIGHTS)})"


def _broken(folder: Path) -> Iterator[str]:
    """Files that are not what their names say."""
    for path in sorted(folder.iterdir()):
        if path.is_symlink() and not path.exists():
            yield f"{path.name} is a link to nothing"
        if not path.is_file():
            continue
        with path.open("rb") as file:
            is_pointer = file.read(len(LFS_POINTER)) == LFS_POINTER
        if path.stat().st_size == 0:
            yield f"{path.name} is empty"
        elif is_pointer:
            yield f"{path.name} is a Git LFS pointer, not the file"
        elif path.suffix == ".safetensors" and (fault := _torn(path)):
            yield f"{path.name} {fault}"


def _torn(file: Path) -> str:
    """What is wrong with a safetensors file, by its header; empty if nothing is."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        if length > min(size, MAX_HEADER_BYTES):
            return "is torn: it ends within its header"
        try:
            header = json.loads(stream.read(length))
            ends = [entry["data_offsets"][1] for k, entry in header.items() if k != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError):
            return "is no safetensors file"
    whole = LENGTH_BYTES + length + max(ends, default=0)
    return "" if size == whole else f"is torn: it has {size:,} of {whole:,} bytes"
