"""Dotted keys of the schema, and the fields of roles that are no keys but shared."""

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hybridrl.config.annotations import FREE, Shared
from hybridrl.config.keys import leaves, raw_tree
from hybridrl.config.schema import RunConfig
from hybridrl.config.typed import annotations_of, element_class, optional_class, type_hints
from hybridrl.config.user_code.classes import BUILT_IN


class Field(typing.NamedTuple):
    """A field on the way to a key: its type, or a role's dataclass, and its annotations."""

    hint: Any
    notes: tuple[Any, ...]


def _section_class(name: str) -> Any:
    hint = type_hints(RunConfig)[name]
    return BUILT_IN[name][1] if name in BUILT_IN else optional_class(hint) or hint


def _shared_fields() -> Iterator[tuple[str, Shared]]:
    for section in type_hints(RunConfig):
        cls = _section_class(section)
        for field in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
            notes = annotations_of(cls, field.name)
            yield from ((f"{section}.{field.name}", n) for n in notes if isinstance(n, Shared))


# Dotted names of fields that are no keys of their own.
SHARED: Mapping[str, Shared] = MappingProxyType(dict(_shared_fields()))


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
        notes = annotations_of(cls, name)
        is_section = cls is RunConfig
        cls = _section_class(name) if is_section else optional_class(hints[name]) or hints[name]
        yield Field(cls, notes)
        if element := element_class(cls):
            next(names, None)  # the entry's name, which is free
            cls = element


def is_free(key: str) -> bool:
    """Return whether `key`, or a section around it, does not affect what a run computes."""
    return any(FREE in field.notes for field in fields_along(key) if field is not None)


def is_read(key: str) -> bool:
    """Return whether the built-in dataclasses have `key`."""
    shared = shared_by(key)
    is_link = shared is not None and shared[1].is_linked and shared[0] == key
    return None not in fields_along(key) and (shared is None or is_link)


def shared_by(key: str) -> tuple[str, Shared] | None:
    """Return the shared field that a key is or lies in; None if there is none."""
    name = ".".join(key.split(".")[:2])
    note = SHARED.get(name)
    return None if note is None else (name, note)


def known_keys(cfg: DictConfig, roles: Mapping[str, type]) -> list[str]:
    """Return the keys of the composed config that are read, and those of the roles' dataclasses."""
    composed = {key for key in leaves(raw_tree(cfg)) if is_read(key)}
    own = {
        f"{role}.{name}"
        for role, cls in roles.items()
        for name, hint in type_hints(cls).items()
        if f"{role}.{name}" not in SHARED and not dataclasses.is_dataclass(hint)
    }
    return sorted(composed | own)


def without_shared(config: Mapping[str, Any]) -> DictConfig:
    """Return a resolved config as it is composed: without equal copies of shared values."""
    whole, cfg = (OmegaConf.create(dict(config)) for _ in range(2))
    for name, note in SHARED.items():
        section, _, field = name.partition(".")
        node, shared = config.get(section) or {}, OmegaConf.select(whole, note.key)
        shared = raw_tree(shared) if isinstance(shared, DictConfig) else shared
        if field in node and node[field] == shared:
            del cfg[section][field]
            if note.is_linked:
                cfg[section][field] = f"${{{note.key}}}"
    return cfg
