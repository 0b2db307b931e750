"""Probes of models, data sets and caches on a node, and rules for them. Nothing is downloaded."""

import os
import pwd
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import constants

from hybridrl.config.errors import ConfigError
from hybridrl.config.planner.cache import cache_folder
from hybridrl.config.planner.memory import gib
from hybridrl.doctor.findings import (
    Finding,
    Rule,
    Verdict,
    fails_if,
    first,
    warns_if,
)
from hybridrl.doctor.host.facts import DiskSpace, disk_space, existing, write_error
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
    from huggingface_hub import errors, snapshot_download  # slow

    try:
        return Path(snapshot_download(name, repo_type=kind, local_files_only=True))
    except (FileNotFoundError, errors.HFValidationError):
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
    findings = []
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
        findings.append(first("inputs.model", node, rules, passed))
    return findings


def judge_cached(name: str, facts: Mapping[str, FolderFacts]) -> list[Finding]:
    """Judge inputs.cache_contents: a repository of the hub, complete and equal on all nodes."""
    cached = {node: folder for node, folder in facts.items() if not folder.error}
    source_node, source = next(iter(cached.items()), ("", FolderFacts("")))
    fetch = f"hf download {name} on that node, or one HF_HOME that all nodes share"
    findings = []
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
        findings.append(first("inputs.cache_contents", node, rules, passed))
    return findings


def differences(here: FolderFacts, there: FolderFacts) -> str:
    """Describe files of two complete models that differ in name, size or fingerprint."""
    if here.faults or there.faults:
        return ""
    texts = []
    for name in sorted({*here.files, *there.files}):
        own, other = here.files.get(name), there.files.get(name)
        if own is None:
            texts.append(f"{name} is missing here")
        elif other is None:
            texts.append(f"{name} exists only here")
        elif own[0] != other[0]:
            texts.append(f"{name} has {own[0]:,} bytes here, {other[0]:,} there")
        elif own != other:
            texts.append(f"{name} has other contents here, but the same size")
    return some(texts)


def some(texts: Sequence[str]) -> str:
    """Join the first few texts, and count the rest."""
    more = f" and {len(texts) - MAX_SHOWN} more" if len(texts) > MAX_SHOWN else ""
    return "; ".join(texts[:MAX_SHOWN]) + more


class CacheFacts(NamedTuple):
    """A cache folder as seen by processes of a node.

    `variable` sets its path; `space` has the error of writing there by `user`. `owner` is that of
    the nearest existing parent. `lacking` are models and datasets to be downloaded.
    """

    variable: str
    name: str
    space: DiskSpace
    owner: str
    user: str
    lacking: tuple[str, ...]


def hub_cache_facts(wanted: Mapping[str, tuple[str, bool]]) -> CacheFacts:
    """Examine the Hugging Face cache for names as of `_hub_names`."""
    lacking = tuple(name for name, needed in wanted.items() if lacks(name, *needed))
    return _facts("HF_HOME", "Hugging Face cache", Path(constants.HF_HUB_CACHE), lacking)


def own_cache_facts() -> CacheFacts:
    """Examine the cache of converted models and compiled kernels."""
    return _facts("HYBRIDRL_CACHE", "hybridrl's cache", cache_folder())


def _facts(variable: str, name: str, folder: Path, lacking: tuple[str, ...] = ()) -> CacheFacts:
    there, locks = existing(folder), folder / ".locks"
    places = [there, locks] if locks.is_dir() else [there]
    errors = [f"{place}: {error}" for place in places if (error := write_error(place))]
    return CacheFacts(
        variable,
        name,
        disk_space(there)._replace(folder=str(folder), error="; ".join(errors)),
        _user(there.stat().st_uid),
        _user(os.geteuid()),
        lacking,
    )


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def judge_cache(
    facts: Mapping[str, CacheFacts], drivers: CacheFacts | None = None
) -> list[Finding]:
    """Judge inputs.cache of each node; `drivers`, if given, must have the same path."""
    findings = []
    for node, cache in facts.items():
        path, _, free, error = cache.space
        drivers_path = path if drivers is None else drivers.space.folder
        evidence = f"{cache.name} ({cache.variable}): {path} (owner {cache.owner}), "
        evidence += f"{gib(free)} free"
        use = "compiled kernels go there" if drivers is None else "all files that it needs exist"
        use = f"{', '.join(cache.lacking)} must be downloaded" if cache.lacking else use
        unwritable = Verdict.fail if cache.lacking else Verdict.warn
        rules: list[Rule] = [
            (
                unwritable if error else None,
                f"{evidence}; {cache.user} cannot write: {error}; {use}",
                f"chown -R {cache.user} {path}, or set {cache.variable} to a writable folder",
            ),
            (
                warns_if(path != drivers_path),
                f"{evidence}; the driver uses {drivers_path}",
                f"export {cache.variable}=... the same on all nodes, before `ray start`",
            ),
        ]
        findings.append(first("inputs.cache", node, rules, evidence))
    return findings
