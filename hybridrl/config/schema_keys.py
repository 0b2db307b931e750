"""Dotted keys of the schema."""

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig

from hybridrl.config.annotations import FREE
from hybridrl.config.keys import leaves, raw_tree
from hybridrl.config.links import LINKS
from hybridrl.config.schema import RunConfig
from hybridrl.config.typed import annotations_of, element_class, optional_class, type_hints
from hybridrl.config.user_code.classes import BUILT_IN


class Field(typing.NamedTuple):
    """A field on the way to a key: its type, or a role's dataclass, and its annotations."""

    hint: Any
    notes: tuple[Any, ...]


def fields_along(key: str) -> Iterator[Field | None]:
    """Yield the built-in dataclasses' fields along a dotted key; None, as the last, if one lacks.

    Mappings of values end it: they hold any key.
    """
    cls: Any = RunConfig
    names = iter(key.split("."))
    for name in names:
        if not dataclasses.is_dataclass(cls):
            return
        hints = type_hints(cls)
        if name not in hints:
            yield None
            return
        is_role = cls is RunConfig and name in BUILT_IN
        notes = annotations_of(cls, name)
        cls = BUILT_IN[name][1] if is_role else optional_class(hints[name]) or hints[name]
        yield Field(cls, notes)
        if element := element_class(cls):
            next(names, None)  # the entry's name, which is free
            cls = element


def is_free(key: str) -> bool:
    """Return whether `key`, or a section around it, does not affect what a run computes."""
    return any(FREE in field.notes for field in fields_along(key) if field is not None)


def is_read(key: str) -> bool:
    """Return whether the built-in dataclasses have `key`."""
    return None not in fields_along(key)


def known_keys(cfg: DictConfig, roles: Mapping[str, type]) -> list[str]:
    """Return the keys of the composed config that are read, and those of the roles' dataclasses."""
    composed = {key for key in leaves(raw_tree(cfg)) if is_read(key)}
    own = {
        f"{role}.{name}"
        for role, cls in roles.items()
        for name, hint in type_hints(cls).items()
        if name not in LINKS.get(role, ()) and not dataclasses.is_dataclass(hint)
    }
    return sorted(composed | own)
