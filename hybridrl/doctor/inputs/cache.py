"""inputs.cache: the folders in which libraries keep what they fetch or make."""

import os
import pwd
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import constants

from hybridrl.config.planner.memory import gib
from hybridrl.doctor.findings import Finding, fail, ok, warn
from hybridrl.doctor.host.facts import Room, room, write_error
from hybridrl.doctor.inputs.facts import lacks
from hybridrl.doctor.inputs.run_directory import existing
from hybridrl.models.cache import cache_folder


class CacheFacts(NamedTuple):
    """A cache folder as a node's processes see it.

    Attributes:
        name: whose cache it is, and the variable that moves it.
        room: its file system; its path.
        exists: whether it is there already.
        owner: user who owns it, or the folder in which it would be made.
        user: who this process is.
        error: where and why nothing can be written; empty if something can.
        lacking: what the run takes from the hub and is not there yet.
    """

    name: str
    room: Room
    exists: bool
    owner: str
    user: str
    error: str
    lacking: tuple[str, ...] = ()


def hub_cache_facts(
    wanted: Mapping[str, str], weightless: Collection[str] = frozenset()
) -> CacheFacts:
    """The Hugging Face cache.

    Args:
        wanted: what the run takes from the hub: names, and model or dataset.
        weightless: models of these whose weights it does not read.
    """
    lacking = [name for name, kind in wanted.items() if lacks(name, kind, name not in weightless)]
    folder = Path(constants.HF_HUB_CACHE)
    return _facts("Hugging Face cache (HF_HOME)", folder)._replace(lacking=tuple(lacking))


def own_cache_facts() -> CacheFacts:
    """The cache of converted models and compiled kernels."""
    return _facts("hybridrl's cache (HYBRIDRL_CACHE)", cache_folder())


def _facts(name: str, folder: Path) -> CacheFacts:
    there = existing(folder)
    errors = [f"{place}: {error}" for place in _places(folder) if (error := write_error(place))]
    return CacheFacts(
        name,
        room(there)._replace(folder=str(folder)),
        folder.is_dir(),
        _user(there.stat().st_uid),
        _user(os.geteuid()),
        "; ".join(errors),
    )


def _places(folder: Path) -> list[Path]:
    """Folders that downloads write to: the cache and, if they are there, its locks."""
    locks = folder / ".locks"
    return [existing(folder), *([locks] if locks.is_dir() else [])]


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def judge_cache(
    facts: Mapping[str, CacheFacts], drivers: CacheFacts | None = None
) -> Iterator[Finding]:
    """inputs.cache of each node.

    Args:
        facts: by node.
        drivers: as the process that starts the run sees it; None: another path is no harm.
    """
    check = "inputs.cache"
    for node, cache in facts.items():
        path, _, free = cache.room
        variable = cache.name.partition("(")[2].rstrip(")")
        made = "" if cache.exists else ", not there yet"
        evidence = f"{cache.name}: {path} (owner {cache.owner}{made}), {gib(free)} free"
        own = (
            f"Let {cache.user} write there (chown -R {cache.user} {path}), or set {variable} to a "
            f"folder of its own, on all nodes"
        )
        if cache.error:
            evidence += f"; {cache.user} cannot write: {cache.error}"
            if cache.lacking:
                evidence += f"; {', '.join(cache.lacking)} is still to be fetched"
                yield fail(check, node, evidence, own)
            else:
                needs = "compiled kernels go there" if drivers is None else "all it needs is there"
                yield warn(check, node, f"{evidence}; {needs}", own)
        elif drivers is not None and path != drivers.room.folder:
            evidence += f"; workers see this, the driver sees {drivers.room.folder}"
            advice = f"export {variable}=... the same on all nodes, before `ray start`"
            yield warn(check, node, evidence, advice)
        else:
            yield ok(check, node, evidence)
