"""Check inputs.cache: the folders of downloaded and converted files."""

import os
import pwd
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import constants

from hybridrl.config.planner.memory import gib
from hybridrl.doctor.findings import Finding, Rule, Verdict, first, warns_if
from hybridrl.doctor.host.facts import DiskSpace, disk_space, existing, write_error
from hybridrl.doctor.inputs.models import lacks
from hybridrl.models.cache import cache_folder


class CacheFacts(NamedTuple):
    """A cache folder as seen by processes of a node.

    Attributes:
        name: of the cache, and the variable that sets its path.
        space: path, and free bytes of its file system.
        exists: False if it must be made.
        owner: of the folder or its nearest existing parent.
        user: of this process.
        error: of writing there, if any.
        lacking: models and datasets to be downloaded.
    """

    name: str
    space: DiskSpace
    exists: bool
    owner: str
    user: str
    error: str
    lacking: tuple[str, ...] = ()


def hub_cache_facts(
    wanted: Mapping[str, str], weightless: Collection[str] = frozenset()
) -> CacheFacts:
    """Examine the Hugging Face cache for `wanted` names with their kind, model or dataset."""
    lacking = [name for name, kind in wanted.items() if lacks(name, kind, name not in weightless)]
    folder = Path(constants.HF_HUB_CACHE)
    return _facts("Hugging Face cache (HF_HOME)", folder)._replace(lacking=tuple(lacking))


def own_cache_facts() -> CacheFacts:
    """Examine the cache of converted models and compiled kernels."""
    return _facts("hybridrl's cache (HYBRIDRL_CACHE)", cache_folder())


def _facts(name: str, folder: Path) -> CacheFacts:
    there, locks = existing(folder), folder / ".locks"
    places = [there, locks] if locks.is_dir() else [there]
    errors = [f"{place}: {error}" for place in places if (error := write_error(place))]
    return CacheFacts(
        name,
        disk_space(there)._replace(folder=str(folder)),
        folder.is_dir(),
        _user(there.stat().st_uid),
        _user(os.geteuid()),
        "; ".join(errors),
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
    found = []
    for node, cache in facts.items():
        path, _, free = cache.space
        variable = cache.name.partition("(")[2].rstrip(")")
        made = "" if cache.exists else ", does not exist yet"
        evidence = f"{cache.name}: {path} (owner {cache.owner}{made}), {gib(free)} free"
        use = "compiled kernels go there" if drivers is None else "all files that it needs exist"
        use = f"{', '.join(cache.lacking)} must be downloaded" if cache.lacking else use
        unwritable = Verdict.fail if cache.lacking else Verdict.warn
        elsewhere = drivers is not None and path != drivers.space.folder
        rules: list[Rule] = [
            (
                unwritable if cache.error else None,
                f"{evidence}; {cache.user} cannot write: {cache.error}; {use}",
                f"chown -R {cache.user} {path}, or set {variable} to a writable folder, on all "
                "nodes",
            ),
            (
                warns_if(elsewhere),
                f"{evidence}; the driver uses {drivers.space.folder if drivers else ''}",
                f"export {variable}=... the same on all nodes, before `ray start`",
            ),
        ]
        found.append(first("inputs.cache", node, rules, evidence))
    return found
