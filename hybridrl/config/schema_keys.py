"""Dotted keys of the schema, and the annotations of their fields by key."""

import dataclasses
import typing
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hybridrl.config.annotations import FREE, Range
from hybridrl.config.keys import leaves
from hybridrl.config.links import LINKS
from hybridrl.config.schema import RunConfig
from hybridrl.config.typed import element_class, optional_class
from hybridrl.config.user_code.classes import BUILT_IN


def _annotations(cls: type = RunConfig, prefix: str = "") -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the annotations of each section and leaf; those of links to shared nodes only once."""
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        if name in LINKS.get(prefix[:-1], {}):
            continue
        key = f"{prefix}{name}"
        plain, *notes = (hint,)
        if typing.get_origin(hint) is typing.Annotated:
            plain, *notes = typing.get_args(hint)
        section = BUILT_IN[name][1] if cls is RunConfig and name in BUILT_IN else plain
        section = optional_class(section) or section
        yield key, tuple(notes)
        if dataclasses.is_dataclass(section):
            yield from _annotations(typing.cast(type, section), f"{key}.")


RANGES: Mapping[str, Range] = MappingProxyType(
    {key: note for key, notes in _annotations() for note in notes if isinstance(note, Range)}
)
_FREE_KEYS = frozenset(key for key, notes in _annotations() if FREE in notes)


def is_free(key: str) -> bool:
    """Return whether `key`, or a section around it, does not affect what a run computes."""
    parts = key.split(".")
    return any(".".join(parts[: n + 1]) in _FREE_KEYS for n in range(len(parts)))


def known_keys(cfg: DictConfig, role_classes: Collection[type]) -> list[str]:
    """Return all keys of the composed config and of the roles' dataclasses that are read."""
    tree = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(tree, dict)
    composed = [key for key in leaves(tree) if is_read(key)]
    roles = dict(zip(BUILT_IN, role_classes, strict=True))
    return sorted({*composed, *_fields(RunConfig, "", roles, tree)})


def _fields(
    cls: type, prefix: str, roles: Mapping[str, type], tree: Mapping[Any, Any]
) -> Iterator[str]:
    """Yield the dotted keys of a dataclass, except the roles' links to shared nodes.

    Args:
        cls: of the section at the dotted key `prefix`.
        roles: each role's dataclass.
        tree: the composed section, which names the sections of mappings.
    """
    for name, hint in typing.get_type_hints(cls).items():
        inner = roles[name] if cls is RunConfig and name in roles else hint
        if name in LINKS.get(prefix[:-1], {}):
            continue
        if dataclasses.is_dataclass(inner):
            inside = _inside(tree, name)
            yield from _fields(typing.cast(type, inner), f"{prefix}{name}.", roles, inside)
        elif element := element_class(inner):
            for entry in _inside(tree, name):
                yield from _fields(element, f"{prefix}{name}.{entry}.", roles, {})
        else:
            yield f"{prefix}{name}"


def _inside(tree: Mapping[Any, Any], name: str) -> Mapping[Any, Any]:
    """Return the section `name` of the tree; empty if there is none."""
    if name in tree and isinstance(tree[name], Mapping):
        return tree[name]
    return {}


def is_read(key: str) -> bool:
    """Return whether the built-in dataclasses have `key`; mappings of values hold any key."""
    cls: Any = RunConfig
    names = iter(key.split("."))
    for name in names:
        if cls is RunConfig and name in BUILT_IN:
            cls = BUILT_IN[name][1]
            continue
        if not dataclasses.is_dataclass(cls):
            return True
        types = typing.get_type_hints(cls)
        if name not in types:
            return False
        cls = optional_class(types[name]) or types[name]
        if element := element_class(cls):
            next(names, None)  # the entry's name, which is free
            cls = element
    return True
