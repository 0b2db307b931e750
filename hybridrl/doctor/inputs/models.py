"""Probe of models and data sets on a node, and rules for them. Nothing is downloaded."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HFValidationError

from hybridrl.config.errors import ConfigError
from hybridrl.config.planner.memory import gib
from hybridrl.doctor.findings import Finding, Rule, Verdict, fails_if, first
from hybridrl.models.fingerprints import fingerprint
from hybridrl.models.resolve import is_on_hub, plain_folder
from hybridrl.models.weight_files import INDEX, read_header, weight_files

CONFIG = "config.json"
WEIGHTS = (".safetensors", ".bin")
DATA = (".parquet", ".arrow", ".json", ".jsonl", ".csv", ".gz", ".zst")
LFS_POINTER = b"version https://git-lfs"
MAX_SHOWN = 3


class FolderFacts(NamedTuple):
    """Model or data set on a node: its folder (of a hub's, the snapshot), or why there is none.

    `files` has bytes and fingerprints of a complete model, `faults` what is damaged or missing;
    `is_offline`: HF_HUB_OFFLINE forbids downloads.
    """

    folder: str
    files: Mapping[str, tuple[int, str]] = {}
    faults: tuple[str, ...] = ()
    error: str = ""
    is_offline: bool = False


def model_facts(path: str, needs_weights: bool) -> FolderFacts:
    """Examine the folder of a model.path of any kind."""
    if is_on_hub(path):
        return hub_facts(path, "model", needs_weights)
    try:
        return folder_facts(plain_folder(path), needs_weights)
    except ConfigError as error:
        return FolderFacts("", error=error.texts[0])


def hub_facts(name: str, kind: str, needs_weights: bool = False) -> FolderFacts:
    """Examine the cached snapshot of a model or dataset (`kind`)."""
    folder = _snapshot(name, kind)
    if folder is None:
        error = f"{name} is not in {constants.HF_HUB_CACHE}"
        return FolderFacts("", error=error, is_offline=constants.HF_HUB_OFFLINE)
    return folder_facts(folder, needs_weights) if kind == "model" else FolderFacts(str(folder))


def folder_facts(folder: Path, needs_weights: bool) -> FolderFacts:
    """Examine the files of a model."""
    faults = (*_missing(folder, needs_weights), *_broken(folder))
    prints = {} if faults else fingerprint(folder, weights=needs_weights)
    files = {name: ((folder / name).stat().st_size, text) for name, text in prints.items()}
    return FolderFacts(str(folder), files, faults)


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


def _missing(folder: Path, needs_weights: bool) -> Iterator[str]:
    if not (folder / CONFIG).is_file():
        yield f"{CONFIG} is missing"
    if not needs_weights:
        return
    try:
        named = [file.name for file in weight_files(folder) if not file.is_file()]
    except ValueError:
        yield f"{INDEX} is torn"
        return
    yield from (f"{name}, which {INDEX} names, is missing" for name in named)
    if not named and not any(path.suffix in WEIGHTS for path in folder.iterdir()):
        yield f"there are no weights ({' or '.join(WEIGHTS)})"


def _broken(folder: Path) -> Iterator[str]:
    """Yield damaged files: dangling links, empty files, Git LFS pointers, torn weights."""
    for path in sorted(folder.iterdir()):
        if path.is_symlink() and not path.exists():
            yield f"{path.name} is a link to nothing"
        if not path.is_file():
            continue
        with path.open("rb") as file:
            start = file.read(len(LFS_POINTER))
        if not start:
            yield f"{path.name} is empty"
        elif start == LFS_POINTER:
            yield f"{path.name} is a Git LFS pointer, not the file"
        elif path.suffix == ".safetensors":
            try:
                read_header(path)
            except ValueError as error:
                yield f"{path.name} is {error}"


def judge_model(name: str, facts: Mapping[str, FolderFacts]) -> list[Finding]:
    """Judge inputs.model: complete on each node, and equal to the first node's, the driver's."""
    driver, source = next(iter(facts.items()))
    copy = (
        f"Copy it from a node where it is complete: rsync -a --checksum <node>:{source.folder}/ "
        f"{source.folder}/; in a Git clone: git lfs pull"
    )
    found = []
    for node, folder in facts.items():
        different, where = differences(folder, source), f"{name} in {folder.folder}"
        absent = copy if source.folder else "Correct model.path"
        rules: list[Rule] = [
            (fails_if(folder.error), folder.error, absent),
            (fails_if(folder.faults), f"{where}: {some(folder.faults)}", copy),
            (fails_if(different), f"{where} differs from {driver}'s: {different}", copy),
        ]
        size = gib(sum(size for size, _ in folder.files.values()))
        passed = f"{name}: {len(folder.files)} files, {size} in {folder.folder}"
        found.append(first("inputs.model", node, rules, passed))
    return found


def judge_cached(name: str, facts: Mapping[str, FolderFacts]) -> list[Finding]:
    """Judge inputs.cache_contents: a repository of the hub, complete and equal on all nodes."""
    cached = {node: folder for node, folder in facts.items() if not folder.error}
    source_node, source = next(iter(cached.items()), ("", FolderFacts("")))
    fetch = f"hf download {name} on that node, or one HF_HOME that all nodes share"
    found = []
    for node, folder in facts.items():
        different = differences(folder, source)
        commit, other = (f.folder.rpartition("/")[2] for f in (folder, source))
        absent, then = Verdict.warn, "the run would download it first"
        if folder.is_offline:
            absent, then = Verdict.fail, "HF_HUB_OFFLINE forbids the download"
        faults = f"{name} in {folder.folder}: {some(folder.faults)}"
        commits = f"{name} at commit {commit[:8]}, on {source_node} at {other[:8]}"
        rules: list[Rule] = [
            (absent if folder.error else None, f"{folder.error}; {then}", fetch),
            (fails_if(folder.faults), faults, fetch),
            (fails_if(commit != other), commits, f"{fetch}: all nodes need the same commit"),
            (fails_if(different), f"{name} differs from {source_node}'s: {different}", fetch),
        ]
        passed = f"{name} at commit {commit[:8]}, complete"
        found.append(first("inputs.cache_contents", node, rules, passed))
    return found


def differences(here: FolderFacts, there: FolderFacts) -> str:
    """Describe files of two complete models that differ in name, size or fingerprint."""
    if here.faults or there.faults:
        return ""
    found = []
    for name in sorted({*here.files, *there.files}):
        own, other = here.files.get(name), there.files.get(name)
        if own is None:
            found.append(f"{name} is missing here")
        elif other is None:
            found.append(f"{name} exists only here")
        elif own[0] != other[0]:
            found.append(f"{name} has {own[0]:,} bytes here, {other[0]:,} there")
        elif own != other:
            found.append(f"{name} has other contents here, but the same size")
    return some(found)


def some(texts: Sequence[str]) -> str:
    """Join the first few texts, and count the rest."""
    more = f" and {len(texts) - MAX_SHOWN} more" if len(texts) > MAX_SHOWN else ""
    return "; ".join(texts[:MAX_SHOWN]) + more
