"""Conversion of composed YAML to the dataclasses of schema.py, collecting all problems."""

import dataclasses
import functools
import re
import typing
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from enum import Enum
from types import UnionType
from typing import Any, NoReturn, TypeVar

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybridrl.config.annotations import CHOSEN, Range, Unusable
from hybridrl.config.command.input_errors import reason_of
from hybridrl.config.command.report import Report, shown
from hybridrl.config.keys import nothing_reads, raw_tree
from hybridrl.config.user_code.files import file_of

T = TypeVar("T")
# Computed once for each class: it took a third of the time of all checks.
type_hints: Callable[..., dict[str, Any]] = functools.cache(typing.get_type_hints)
# For OmegaConf's conversions, one for each class: it took another third.
structured: Callable[[type], DictConfig] = functools.cache(OmegaConf.structured)
LINK = re.compile(r"\$\{([\w.]+)\}")


class Builder:
    """Builder of config sections, which lack the fields without a usable value.

    Args:
        report: collects problems and broken keys.
        known: all keys, for "did you mean".
    """

    def __init__(self, report: Report, known: Collection[str]) -> None:
        self.report = report
        self.known = known

    def section(
        self, cls: type[T], value: Any, path: str, shared: Mapping[str, Any] | None = None
    ) -> T:
        """Build a section from a value that may not be one; then it has no field.

        `shared` are fields that link to shared nodes, already built.
        """
        values = dict(shared or {})
        if not isinstance(value, DictConfig):
            self.report.add(
                f"{path} = {shown(value)}, expected a section.\nSet {path}.<key>=<value>.",
                broken=path,
            )
            return partial_section(cls, values)
        fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        for name in map(str, value):
            if name not in fields:
                key = f"{path}.{name}"
                self.report.problems += nothing_reads(key, raw_tree(value)[name], self.known)
        for name, field in fields.items():
            if name not in values:
                with suppress(Unusable):
                    values[name] = self.field(field, cls, value, f"{path}.{name}")
        if self.report.usable([path]):
            try:
                return cls(**values)
            except (TypeError, ValueError) as error:  # a subclass's __post_init__
                self.report.add(f"{path}: {error}", broken=path)
        return partial_section(cls, values)

    def field(self, field: dataclasses.Field[Any], cls: type, node: DictConfig, key: str) -> Any:
        """Return a field's converted value.

        Raises:
            Unusable: it has none; the problem is in the report.
        """
        name, hint = field.name, type_hints(cls)[field.name]
        if OmegaConf.is_missing(node, name):
            self._refuse(key, f"{key} is missing.\nSet {key}=<{type_name(hint)}>.")
        if name not in node:
            return self._default(cls, field, hint, key)
        try:
            value = node[name]
        except OmegaConfBaseException as error:
            raw = shown(raw_tree(node)[name])
            problem = f"{key} = {raw} cannot be resolved: {reason_of(error)}."
            to_itself = raw == f"${{{key}}}"
            self._refuse(key, problem if to_itself or not self._is_link(node, name) else None)
        element = element_class(hint)
        if element is not None and isinstance(value, DictConfig):
            names = map(str, value)
            return {name: self._element(element, value[name], f"{key}.{name}") for name in names}
        if dataclasses.is_dataclass(hint):
            return self.section(typing.cast(type, hint), value, key)
        return self._leaf(cls, hint, node, name, key)

    def _element(self, cls: type[T], value: Any, path: str) -> T:
        """Build an entry of a mapping; absent optional fields are None, as YAML has no defaults."""
        hints = type_hints(cls)
        given = value if isinstance(value, DictConfig) else {}
        absent = [name for name in hints if name not in given and _may_be_null(hints[name])]
        return self.section(cls, value, path, dict.fromkeys(absent))

    def _leaf(self, cls: type, hint: Any, node: DictConfig, name: str, key: str) -> Any:
        """Return a leaf's value, converted by OmegaConf's rules and within its range."""
        typed, value = structured(cls), node[name]
        may_be_null = CHOSEN in annotations_of(cls, name)
        if value is None and may_be_null:
            return None
        try:
            if isinstance(value, DictConfig | ListConfig):
                value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
            typed[name] = value
            found = typed[name]
            if isinstance(found, DictConfig | ListConfig):
                found = OmegaConf.to_object(found)
        except (OmegaConfBaseException, OverflowError):  # an integer too large for a float
            or_null = " or null" * may_be_null
            problem = f"{key} = {shown(value)}, expected {type_name(hint)}{or_null}."
            self._refuse(key, None if self._is_link(node, name) else problem)
        if found is not None and not OmegaConf.is_interpolation(node, name):
            for note in annotations_of(cls, name):
                if isinstance(note, Range) and (wrong := note.problem(key, found)):
                    self._refuse(key, wrong)
        return found

    def _default(self, cls: type, field: dataclasses.Field[Any], hint: Any, key: str) -> Any:
        """Return the default of a field; only users' subclasses have some."""
        if field.default is not dataclasses.MISSING:
            return field.default
        if field.default_factory is not dataclasses.MISSING:
            return field.default_factory()
        place = file_of(cls.__module__) or cls.__module__
        self._refuse(
            key,
            f"{key} is missing: {cls.__qualname__} in {place} has no default for it.\n"
            f"Set +{key}=<{type_name(hint)}>.",
        )

    def _is_link(self, node: DictConfig, name: str) -> bool:
        """Return whether a value is only a link to a known key, which has its own report."""
        link = LINK.fullmatch(str(raw_tree(node)[name]))
        return link is not None and link[1] in self.known

    def _refuse(self, key: str, problem: str | None) -> NoReturn:
        self.report.broken.add(key)
        if problem is not None:
            self.report.add(problem)
        raise Unusable(key)


def partial_section(cls: type[T], values: Mapping[str, Any]) -> T:
    """Return an instance with only these fields, without __init__ and so without its checks."""
    instance = object.__new__(cls)
    vars(instance).update(values)
    return instance


def annotations_of(cls: Any, name: str) -> tuple[Any, ...]:
    """Return the annotations of a dataclass's field."""
    hint = type_hints(cls, include_extras=True)[name]
    return typing.get_args(hint)[1:] if typing.get_origin(hint) is typing.Annotated else ()


def _may_be_null(hint: Any) -> bool:
    return hint is Any or type(None) in typing.get_args(hint)


def element_class(hint: Any) -> Any:
    """Return the dataclass of a mapping's values; None for other types."""
    values = typing.get_args(hint)[1:] if typing.get_origin(hint) is dict else ()
    return values[0] if values and dataclasses.is_dataclass(values[0]) else None


def optional_class(hint: Any) -> Any:
    """Return the dataclass of an optional section; None for other types."""
    options = typing.get_args(hint) if isinstance(hint, UnionType) else ()
    found = [option for option in options if dataclasses.is_dataclass(option)]
    return found[0] if found else None


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
