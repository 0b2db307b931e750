"""Conversion of composed YAML to the dataclasses of schema.py, collecting all problems."""

import dataclasses
import re
import typing
from collections.abc import Collection, Mapping
from enum import Enum
from types import UnionType
from typing import Any, TypeVar

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybridrl.config.command.input_errors import reason_of
from hybridrl.config.command.report import Report, shown
from hybridrl.config.keys import nothing_reads

T = TypeVar("T")
LINK = re.compile(r"\$\{([\w.]+)\}")


class Builder:
    """Builder of config sections; fields without a usable value are None and marked as broken.

    Args:
        report: collects problems and broken keys.
        known: all keys, for "did you mean".
        circular: keys whose links lead back to themselves.
    """

    def __init__(
        self, report: Report, known: Collection[str], circular: Collection[str] = ()
    ) -> None:
        self.report = report
        self.known = known
        self.circular = circular
        # Cache for OmegaConf's conversions: building one per leaf doubled the time of all checks.
        self._structured: dict[type, DictConfig] = {}

    def section(
        self, cls: type[T], value: Any, path: str, shared: Mapping[str, Any] | None = None
    ) -> T:
        """Build a section from a value that may not be one; then the section is broken."""
        if isinstance(value, DictConfig):
            return self.build(cls, value, path, shared)
        self.report.add(
            f"{path} = {shown(value)}, expected a section.\nSet {path}.<key>=<value>.",
            broken=path,
        )
        return Builder(Report(), ()).build(cls, OmegaConf.create({}), path, shared)

    def build(
        self, cls: type[T], node: DictConfig, path: str, shared: Mapping[str, Any] | None = None
    ) -> T:
        """Build an instance of `cls` from `node`, the section at the dotted key `path`.

        Args:
            cls: a dataclass of schema.py or a subclass of one.
            node: the section of the composed config.
            path: its dotted key.
            shared: fields that link to shared nodes, already built.
        """
        values = dict(shared or {})
        fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        hints = typing.get_type_hints(cls)
        for name in map(str, node):
            if name not in fields:
                key = f"{path}.{name}"
                for problem in nothing_reads(key, raw_value(node, name), self.known):
                    self.report.add(problem)
        for name, field in fields.items():
            if name not in values:
                values[name] = self.field(field, hints[name], cls, node, f"{path}.{name}")
        return _instance(cls, values, path, self.report)

    def field(
        self, field: dataclasses.Field[Any], hint: Any, cls: type, node: DictConfig, key: str
    ) -> Any:
        """Return a field's converted value; None if it has none."""
        if OmegaConf.is_missing(node, field.name):
            self.report.add(f"{key} is missing.\nSet {key}=<{type_name(hint)}>.", broken=key)
            return None
        if field.name not in node:
            return _default(cls, field, hint, key, self.report)
        try:
            value = node[field.name]
        except OmegaConfBaseException as error:
            self.report.broken.add(key)
            if key in self.circular or not self.is_link(node, field.name):
                raw, reason = raw_value(node, field.name), reason_of(error)
                self.report.add(f"{key} = {shown(raw)} cannot be resolved: {reason}.")
            return None
        element = element_class(hint)
        if element is not None and isinstance(value, DictConfig):
            names = map(str, value)
            return {name: self.element(element, value[name], f"{key}.{name}") for name in names}
        if not dataclasses.is_dataclass(hint):
            return self.leaf(cls, hint, node, field.name, key)
        return self.section(typing.cast(type, hint), value, key)

    def element(self, cls: type[T], value: Any, path: str) -> T:
        """Build an entry of a mapping; absent optional fields are None, as YAML cannot hold "
        "defaults."""
        hints = typing.get_type_hints(cls)
        given = value if isinstance(value, DictConfig) else {}
        absent = [name for name in hints if name not in given and _may_be_null(hints[name])]
        return self.section(cls, value, path, dict.fromkeys(absent))

    def is_link(self, node: DictConfig, name: str) -> bool:
        """Return whether a value is only a link to a known key, which has its own report."""
        link = LINK.fullmatch(str(raw_value(node, name)))
        return link is not None and link[1] in self.known

    def leaf(self, cls: type, hint: Any, node: DictConfig, name: str, key: str) -> Any:
        """Return a leaf's value, converted to the field's type by OmegaConf's rules."""
        if cls not in self._structured:
            self._structured[cls] = OmegaConf.structured(cls)
        typed = self._structured[cls]
        value = node[name]
        try:
            if isinstance(value, DictConfig | ListConfig):
                value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
            typed[name] = value
            converted = typed[name]
            if isinstance(converted, DictConfig | ListConfig):
                return OmegaConf.to_object(converted)
            return converted
        except (OmegaConfBaseException, OverflowError):  # an integer too large for a float
            self.report.broken.add(key)
            if not self.is_link(node, name):
                self.report.add(f"{key} = {shown(value)}, expected {type_name(hint)}.")
            return None


def _default(cls: type, field: dataclasses.Field[Any], hint: Any, key: str, report: Report) -> Any:
    """Return the default of a dataclass; only users' subclasses have some."""
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    report.add(
        f"{key} is missing: {cls.__module__}.{cls.__qualname__} has no default for it.\n"
        f"Set +{key}=<{type_name(hint)}>.",
        broken=key,
    )
    return None


def _instance(cls: type[T], values: dict[str, Any], path: str, report: Report) -> T:
    """Return `cls(**values)`; without __init__, and so without its checks, if values are "
    "missing."""
    if report.usable([path]):
        try:
            return cls(**values)
        except (TypeError, ValueError) as error:  # a subclass's __post_init__
            report.add(f"{path}: {error}", broken=path)
    instance = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(instance, name, value)
    return instance


def _may_be_null(hint: Any) -> bool:
    return hint is Any or type(None) in typing.get_args(hint)


def circular_links(values: Mapping[str, Any]) -> set[str]:
    """Return the keys whose links lead back to themselves.

    Args:
        values: unresolved, by dotted key.
    """
    matches = {key: LINK.fullmatch(value) for key, value in values.items() if type(value) is str}
    links = {key: match[1] for key, match in matches.items() if match}
    found = set()
    for key, target in links.items():
        seen = {key}
        while target in links and target not in seen:
            seen.add(target)
            target = links[target]
        if target == key:
            found.add(key)
    return found


def element_class(hint: Any) -> Any:
    """Return the dataclass of a mapping's values; None for other types."""
    values = typing.get_args(hint)[1:] if typing.get_origin(hint) is dict else ()
    return values[0] if values and dataclasses.is_dataclass(values[0]) else None


def optional_class(hint: Any) -> Any:
    """Return the dataclass of an optional section; None for other types."""
    options = typing.get_args(hint) if isinstance(hint, UnionType) else ()
    found = [option for option in options if dataclasses.is_dataclass(option)]
    return found[0] if found else None


def raw_value(node: DictConfig, name: str) -> Any:
    """Return the unresolved value of a key."""
    tree = OmegaConf.to_container(node, resolve=False)
    assert isinstance(tree, dict)
    return tree[name]


def type_name(hint: Any) -> str:
    """Return a type in words: 'an integer', 'one of k1, k2, k3', 'a number or null'."""
    if isinstance(hint, UnionType) or typing.get_origin(hint) is typing.Union:
        return " or ".join(type_name(option) for option in typing.get_args(hint))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "one of " + ", ".join(member.name for member in hint)
    if typing.get_origin(hint) is list:
        examples = {str: "[a, b]", int: "[3, 4]"}
        return f"a list such as {examples.get(typing.get_args(hint)[0], '[0.9, 0.999]')}"
    if typing.get_origin(hint) is dict:
        return "a mapping of keys to values"
    names = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
    return names.get(hint, "null" if hint is type(None) else "a value")
