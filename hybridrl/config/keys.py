"""Dotted keys: leaves of a config, and suggestions for unknown keys."""

import difflib
import functools
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from omegaconf import DictConfig, OmegaConf

from hybridrl.config.errors import Problem

# Groups that are not in the defaults list.
ADDED_GROUPS = ("recipe",)
# In place of a key of ours: what theirs chooses is always so here.
NO_KEY = "-"


class OtherName(NamedTuple):
    """A key of another trainer, and what it is here.

    Attributes:
        trainer: its name.
        key: dotted, as its users write it.
        ours: keys or a group, separated by commas, or NO_KEY.
        difference: in meaning; may be empty.
    """

    trainer: str
    key: str
    ours: str
    difference: str


@functools.cache
def other_names() -> list[OtherName]:
    """Read other_trainers.txt, which also makes the tables of docs/coming_from.md."""
    text = Path(__file__).with_name("other_trainers.txt").read_text(encoding="ascii")
    return [OtherName(*(part.strip() for part in line.split("|"))) for line in text.splitlines()]


def raw_tree(cfg: DictConfig) -> dict[Any, Any]:
    """Return a config as plain data, links unresolved."""
    return cast(dict[Any, Any], OmegaConf.to_container(cfg, resolve=False))


def leaves(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return every leaf of nested mappings by dotted key; an empty mapping is a leaf."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            flat |= leaves(value, f"{key}.")
        else:
            flat[key] = value
    return flat


def similar_keys(key: str, known: Collection[str]) -> list[str]:
    """Return up to three known keys similar to `key`, most similar first."""
    parent, dot, name = key.rpartition(".")
    below = [k.removeprefix(parent + dot) for k in known if k.startswith(parent + dot)]
    siblings = {k.partition(".")[0]: f"{parent}{dot}{k.partition('.')[0]}" for k in below}
    near = [siblings[n] for n in difflib.get_close_matches(name, siblings, n=2, cutoff=0.65)]
    near += difflib.get_close_matches(key, known, n=2, cutoff=0.8)
    near += sorted(k for k in known if k.rpartition(".")[2] == name)
    return list(dict.fromkeys(near))[:3]


def similar_siblings(key: str, names: Collection[str]) -> list[str]:
    """Return up to two keys beside `key`, with one of `names`, similar to it."""
    parent, dot, name = key.rpartition(".")
    near = difflib.get_close_matches(name, names, n=2, cutoff=0.65)
    return [f"{parent}{dot}{name}" for name in near]


def unknown_sibling(key: str, value: Any, names: Collection[str]) -> str:
    """Return the problem of a `key` whose section has only `names`."""
    near = similar_siblings(key, names)
    meant = f"Did you mean {' or '.join(near)}?" if near else f"Known keys: {', '.join(names)}."
    return f"{key} = {value}: unknown key, nothing reads it. {meant}"


def named_elsewhere(key: str) -> list[OtherName]:
    """Return the keys of other trainers that `key` may be, one for each key of ours.

    Those with the most last words in common count: users leave out sections or guess other ones. An
    equal key counts more, and the beginning of a last word least.
    """
    words = key.split(".")
    by_length: dict[int, list[OtherName]] = {}
    for other in other_names():
        theirs = other.key.split(".")
        common = len(words) if words == theirs[-len(words) :] else 0
        common = len(theirs) if theirs == words[-len(theirs) :] else common
        common += theirs == words
        # A last word alone must be distinctive, as `name` and `path` are not.
        if common or (words[-1] == theirs[-1] and "_" in words[-1]):
            by_length.setdefault(common, []).append(other)
        elif theirs[-1].startswith(f"{words[-1]}_") and "_" in words[-1]:  # n_gpus
            by_length.setdefault(-1, []).append(other)
    best = by_length[max(by_length)] if by_length else []
    return list({other.ours: other for other in reversed(best)}.values())[::-1]


def did_you_mean(key: str, known: Collection[str]) -> str:
    """Return what other trainers' `key` is here, "Did you mean ...?", or the way to list keys."""
    if others := named_elsewhere(key):
        return " ".join(_translated(other) for other in others)
    near = similar_keys(key, known)
    return f"Did you mean {' or '.join(near)}?" if near else "Add --cfg job to list every key."


def _translated(other: OtherName) -> str:
    what = f"{other.trainer}'s {other.key}"
    if other.ours == NO_KEY:
        return f"{what} has no key here: {other.difference}."
    ours = " and ".join(other.ours.split(", "))
    return f"{what} is {ours} here{f': {other.difference}' if other.difference else ''}."


def nothing_reads(key: str, value: Any, known: Collection[str]) -> list[Problem]:
    """Return the problem of a key that nothing reads; of a section, one per leaf."""
    why = "unknown key, nothing reads it"
    return [
        Problem("unknown_key", leaf, content, why=why, remedy=did_you_mean(leaf, known))
        for leaf, content in leaves({key: value}).items()
    ]
