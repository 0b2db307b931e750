"""Dotted keys: leaves of a config, and suggestions for unknown keys."""

import difflib
from collections.abc import Collection, Mapping
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

# Groups that are not in the defaults list.
ADDED_GROUPS = ("recipe", "sweep")


def raw_tree(cfg: DictConfig) -> dict[Any, Any]:
    """Return a config as plain data, links unresolved."""
    return cast(dict[Any, Any], OmegaConf.to_container(cfg, resolve=False))


def leaves(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return every leaf of nested mappings by dotted key; an empty mapping is a leaf."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            found |= leaves(value, f"{key}.")
        else:
            found[key] = value
    return found


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
    return [f"{parent}{dot}{found}" for found in near]


def unknown_sibling(key: str, value: Any, names: Collection[str]) -> str:
    """Return the problem of a `key` whose section has only `names`."""
    near = similar_siblings(key, names)
    meant = f"Did you mean {' or '.join(near)}?" if near else f"Known keys: {', '.join(names)}."
    return f"{key} = {value}: unknown key, nothing reads it. {meant}"


def did_you_mean(key: str, known: Collection[str]) -> str:
    """Return "Did you mean ...?", or the way to list all keys."""
    near = similar_keys(key, known)
    return f"Did you mean {' or '.join(near)}?" if near else "Add --cfg job to list every key."


def nothing_reads(key: str, value: Any, known: Collection[str]) -> list[str]:
    """Return the problem of a key that nothing reads; of a section, one per leaf."""
    return [
        f"{leaf} = {found}: unknown key, nothing reads it. {did_you_mean(leaf, known)}"
        for leaf, found in leaves({key: value}).items()
    ]
