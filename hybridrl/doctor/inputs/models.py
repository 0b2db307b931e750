"""Probe of models and data sets on a node, and rules for them. Nothing is downloaded."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HFValidationError

from hybridrl.config.errors import ConfigError
from hybridrl.config.planner.memory import gib
from hybridrl.doctor.findings import Finding, Rule, Verdict, fails_if, first
from hybridrl.models import smollm2
from hybridrl.models.file_hashes import fingerprint
from hybridrl.models.resolve import EMBEDDED, absolute_path, plain_folder

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
WEIGHTS = (".safetensors", ".bin")
DATA = (".parquet", ".arrow", ".json", ".jsonl", ".csv", ".gz", ".zst")
READ = (WEIGHTS[0], ".json", ".jinja", ".model", ".txt")
LFS_POINTER = b"version https://git-lfs"
# A safetensors file begins with the length of its header.
LENGTH_BYTES, MAX_HEADER_BYTES = 8, 100_000_000
MAX_SHOWN = 3


class FolderFacts(NamedTuple):
    """Files of a model or data set on a node.

    Attributes:
        folder: of a hub's, the snapshot.
        files: bytes by name.
        faults: damaged or missing files.
        error: why there is no folder.
        is_offline: HF_HUB_OFFLINE forbids downloads.
        prints: fingerprints of the files of a complete model, by name.
    """

    folder: str
    files: dict[str, int]
    faults: tuple[str, ...]
    error: str
    is_offline: bool = False
    prints: Mapping[str, str] | None = None


def is_on_hub(path: str) -> bool:
    """Return True if model.path names a model on the hub."""
    made_here = path in (EMBEDDED, smollm2.NAME)
    return not made_here and absolute_path(path) == path and not Path(path).is_absolute()


def model_facts(path: str, needs_weights: bool) -> FolderFacts:
    """Examine the folder of a model.path of any kind."""
    if is_on_hub(path):
        return hub_facts(path, "model", needs_weights)
    try:
        return folder_facts(plain_folder(path), needs_weights)
    except ConfigError as error:
        return FolderFacts("", {}, (), error.problems[0])


def hub_facts(name: str, kind: str, needs_weights: bool = False) -> FolderFacts:
    """Examine the cached snapshot of a model or dataset (`kind`)."""
    folder = _snapshot(name, kind)
    if folder is None:
        error = f"{name} is not in {constants.HF_HUB_CACHE}"
        return FolderFacts("", {}, (), error, constants.HF_HUB_OFFLINE)
    if kind == "model":
        return folder_facts(folder, needs_weights)
    sizes = {
        file.relative_to(folder).as_posix(): file.stat().st_size
        for file in sorted(folder.rglob("*.parquet"))
    }
    return FolderFacts(str(folder), sizes, (), "")


def folder_facts(folder: Path, needs_weights: bool) -> FolderFacts:
    """Examine the files of a model."""
    faults = [*_missing(folder, needs_weights), *_broken(folder)]
    prints = None if faults else fingerprint(folder, weights=needs_weights)
    return FolderFacts(str(folder), _sizes(folder), tuple(faults), "", prints=prints)


def lacks(name: str, kind: str, needs_weights: bool) -> bool:
    """Return True if files of a model or dataset (`kind`) of the hub must be downloaded."""
    folder = _snapshot(name, kind)
    if folder is None:
        return True
    if kind == "model":
        return any(_missing(folder, needs_weights))
    return not any(path.suffix in DATA for path in folder.rglob("*"))


def _snapshot(name: str, kind: str) -> Path | None:
    try:
        return Path(snapshot_download(name, repo_type=kind, local_files_only=True))
    except (FileNotFoundError, HFValidationError):
        return None


def _sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of each file that a run reads; weights may exist in other formats, too."""
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
        absent = [name for name in named if not (folder / name).is_file()]
        yield from (f"{name}, which {INDEX} names, is missing" for name in absent)
    elif not any(path.suffix in WEIGHTS for path in folder.iterdir()):
        yield f"there are no weights ({' or '.join(WEIGHTS)})"


def _broken(folder: Path) -> Iterator[str]:
    """Yield damaged files: dangling links, empty files, Git LFS pointers, torn weights."""
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
    """Compare a safetensors file with its header; return the fault, or an empty string."""
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


def judge_model(name: str, facts: Mapping[str, FolderFacts]) -> list[Finding]:
    """Judge inputs.model: complete on each node, and equal to the first node's, the driver's."""
    driver, source = next(iter(facts.items()))
    copy = (
        f"Copy it from a node where it is complete: rsync -a --checksum <node>:{source.folder}/ "
        f"{source.folder}/; in a Git clone: git lfs pull"
    )
    found = []
    for node, folder in facts.items():
        different = "" if source.faults else differences(folder, source)
        where = f"{name} in {folder.folder}"
        rules: list[Rule] = [
            (
                fails_if(bool(folder.error)),
                folder.error,
                copy if source.folder else "Correct model.path",
            ),
            (fails_if(bool(folder.faults)), f"{where}: {some(folder.faults)}", copy),
            (fails_if(bool(different)), f"{where} differs from {driver}'s: {different}", copy),
        ]
        passed = f"{name}: {len(folder.files)} files, {gib(sum(folder.files.values()))} in "
        found.append(first("inputs.model", node, rules, f"{passed}{folder.folder}"))
    return found


def judge_cached(name: str, facts: Mapping[str, FolderFacts]) -> list[Finding]:
    """Judge inputs.cache_contents: a repository of the hub, complete and equal on all nodes."""
    cached = {node: folder for node, folder in facts.items() if not folder.error}
    source_node, source = next(iter(cached.items()), ("", FolderFacts("", {}, (), "")))
    fetch = f"hf download {name} on that node, or one HF_HOME that all nodes share"
    found = []
    for node, folder in facts.items():
        different = "" if source.faults else differences(folder, source)
        commit, other = (f.folder.rpartition("/")[2] for f in (folder, source))
        offline = "HF_HUB_OFFLINE forbids the download"
        then = offline if folder.is_offline else "the run would download it first"
        absent = Verdict.fail if folder.is_offline else Verdict.warn
        rules: list[Rule] = [
            (absent if folder.error else None, f"{folder.error}; {then}", fetch),
            (
                fails_if(bool(folder.faults)),
                f"{name} in {folder.folder}: {some(folder.faults)}",
                fetch,
            ),
            (
                fails_if(commit != other),
                f"{name} at commit {commit[:8]}, on {source_node} at {other[:8]}",
                f"{fetch}: all nodes need the same commit",
            ),
            (fails_if(bool(different)), f"{name} differs from {source_node}'s: {different}", fetch),
        ]
        passed = f"{name} at commit {commit[:8]}, complete"
        found.append(first("inputs.cache_contents", node, rules, passed))
    return found


def differences(here: FolderFacts, there: FolderFacts) -> str:
    """Describe files of two folders that differ in name, size or fingerprint."""
    found = []
    prints, other_prints = here.prints or {}, there.prints or {}
    for name in sorted({*here.files, *there.files}):
        size, other = here.files.get(name), there.files.get(name)
        both = (prints.get(name), other_prints.get(name))
        if size is None:
            found.append(f"{name} is missing here")
        elif other is None:
            found.append(f"{name} exists only here")
        elif size != other:
            found.append(f"{name} has {size:,} bytes here, {other:,} there")
        elif None not in both and both[0] != both[1]:
            found.append(f"{name} has other contents here, but the same size")
    return some(found)


def some(texts: Sequence[str]) -> str:
    """Join the first few texts, and count the rest."""
    more = f" and {len(texts) - MAX_SHOWN} more" if len(texts) > MAX_SHOWN else ""
    return "; ".join(texts[:MAX_SHOWN]) + more
