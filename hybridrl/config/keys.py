"""Dotted keys: listing them, and guessing which one was meant."""

import difflib
from collections.abc import Collection, Mapping
from typing import Any

# Groups that are in no defaults list: a run has none of them unless it asks for one.
ADDED_GROUPS = ("recipe", "sweep")


def leaves(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Every leaf of nested mappings by its dotted key; an empty mapping is a leaf."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            found |= leaves(value, f"{key}.")
        else:
            found[key] = value
    return found


def similar_keys(key: str, known: Collection[str]) -> list[str]:
    """Up to three of the known keys that `key` may have been meant to be, likeliest first."""
    parent, dot, name = key.rpartition(".")
    below = [k.removeprefix(parent + dot) for k in known if k.startswith(parent + dot)]
    siblings = {k.partition(".")[0]: f"{parent}{dot}{k.partition('.')[0]}" for k in below}
    near = [siblings[n] for n in difflib.get_close_matches(name, siblings, n=2, cutoff=0.65)]
    near += difflib.get_close_matches(key, known, n=2, cutoff=0.8)
    near += sorted(k for k in known if k.rpartition(".")[2] == name)
    return list(dict.fromkeys(near))[:3]


def similar_siblings(key: str, names: Collection[str]) -> list[str]:
    """Up to two keys beside `key`, by their `names`, that it may have been meant to be."""
    parent, dot, name = key.rpartition(".")
    near = difflib.get_close_matches(name, names, n=2, cutoff=0.65)
    return [f"{parent}{dot}{found}" for found in near]


def unknown_sibling(key: str, value: Any, names: Collection[str]) -> str:
    """The problem of a `key` that is none of those, by `names`, which its section takes."""
    near = similar_siblings(key, names)
    meant = f"Did you mean {' or '.join(near)}?" if near else f"It takes {', '.join(names)}."
    return f"{key} = {value}: unknown key, nothing reads it. {meant}"


def did_you_mean(key: str, known: Collection[str]) -> str:
    """A question naming the keys that may have been meant, or where to find them all."""
    near = similar_keys(key, known)
    if near:
        return f"Did you mean {' or '.join(near)}?"
    return "Add --cfg job to list every key."


def nothing_reads(key: str, value: Any, known: Collection[str]) -> list[str]:
    """The problem of a key that no part of the program reads; of a section, one per leaf."""
    return [
        f"{leaf} = {found}: unknown key, nothing reads it. {did_you_mean(leaf, known)}"
        for leaf, found in leaves({key: value}).items()
    ]
