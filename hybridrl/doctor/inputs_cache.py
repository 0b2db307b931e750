"""inputs.cache: the folders in which libraries keep what they fetch or make."""

import os
import pwd
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import constants

from hybridrl.config.memory import gib
from hybridrl.doctor.findings import Finding, fail, ok, warn
from hybridrl.doctor.host_facts import Room, room, write_error
from hybridrl.doctor.inputs_run_directory import existing
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
        offline: HF_HUB_OFFLINE.
    """

    name: str
    room: Room
    exists: bool
    owner: str
    user: str
    error: str
    offline: bool


def cache_facts(name: str = "huggingface") -> CacheFacts:
    """The Hugging Face cache or, for `hybridrl`, that of converted models and compiled kernels."""
    if name == "huggingface":
        folder, text = Path(constants.HF_HUB_CACHE), "Hugging Face cache (HF_HOME)"
    else:
        folder, text = cache_folder(), "hybridrl's cache (HYBRIDRL_CACHE)"
    there = existing(folder)
    errors = [f"{place}: {error}" for place in _places(folder) if (error := write_error(place))]
    return CacheFacts(
        text,
        room(there)._replace(folder=str(folder)),
        folder.is_dir(),
        _user(there.stat().st_uid),
        _user(os.geteuid()),
        "; ".join(errors),
        constants.HF_HUB_OFFLINE,
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
    facts: Mapping[str, CacheFacts], drivers: CacheFacts, *, needed: bool
) -> Iterator[Finding]:
    """inputs.cache of each node.

    Args:
        facts: by node.
        drivers: as the process that starts the run sees it.
        needed: whether the run reads something from the hub.
    """
    check = "inputs.cache"
    for node, cache in facts.items():
        path, _, free = cache.room
        made = "" if cache.exists else ", not there yet"
        evidence = f"{cache.name}: {path} (owner {cache.owner}{made}), {gib(free)} free"
        own = (
            f"Let {cache.user} write there (chown -R {cache.user} {path}), or set "
            f"{_variable(cache)} to a folder of its own, on all nodes"
        )
        if cache.error and needed and not cache.offline:
            evidence += f"; {cache.user} cannot write: {cache.error}"
            yield fail(check, node, evidence, own)
        elif cache.error:
            evidence += f"; {cache.user} cannot write: {cache.error}; this run may do without"
            yield warn(check, node, evidence, own)
        elif needed and path != drivers.room.folder:
            yield warn(
                check,
                node,
                f"{evidence}; workers there see another path than the driver, "
                f"{drivers.room.folder}",
                f"export {_variable(cache)}=... the same on all nodes, before `ray start`",
            )
        else:
            yield ok(check, node, evidence)


def _variable(cache: CacheFacts) -> str:
    return cache.name.partition("(")[2].rstrip(")")
