"""Conversion of composed YAML to the dataclasses of schema.py, collecting all problems."""

import dataclasses
import functools
import re
import typing
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from operator import attrgetter
from types import UnionType
from typing import Any, NoReturn, TypeVar

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybridrl.config.annotations import CHOSEN, NoValue, Range, Shared, Unusable
from hybridrl.config.command.input_errors import reason_of
from hybridrl.config.errors import ABSENT, Problem, Report, shown
from hybridrl.config.keys import nothing_reads, raw_tree
from hybridrl.config.schema import RunConfig
from hybridrl.config.user_code.files import file_of

T = TypeVar("T")
# Computed once for each class: it took a third of the time of all checks.
type_hints: Callable[..., dict[str, Any]] = functools.cache(typing.get_type_hints)
# For OmegaConf's conversions, one for each class: it took another third.
structured: Callable[[type], DictConfig] = functools.cache(OmegaConf.structured)
LINK = re.compile(r"\$\{([\w.]+)\}")


class Builder:
    """Builder of a config, whose fields without a usable value hold a NoValue.

    Args:
        cfg: as composed, links unresolved.
        roles: dataclass of each role.
        known: all keys, for "did you mean".
        report: collects problems and broken keys.
    """

    def __init__(
        self, cfg: DictConfig, roles: Mapping[str, type], known: Collection[str], report: Report
    ) -> None:
        self.cfg = cfg
        self.roles = roles
        self.known = known
        self.report = report
        self.built: dict[str, Any] = {}

    def run(self) -> RunConfig:
        """Build all sections."""
        fields = dataclasses.fields(RunConfig)
        return RunConfig(**{field.name: self.part(field.name) for field in fields})

    def part(self, name: str) -> Any:
        """Return a section or value of the run; builds it once, after those that it shares."""
        if name not in self.built:
            field = RunConfig.__dataclass_fields__[name]
            hint = type_hints(RunConfig)[name]
            cls = self.roles.get(name) or optional_class(hint) or hint
            if not dataclasses.is_dataclass(cls):
                self.built[name] = self.value(field, RunConfig, self.cfg, name)
            else:
                node = OmegaConf.select(self.cfg, name, throw_on_resolution_failure=False)
                may_lack = node is None and optional_class(hint) is not None
                section = typing.cast(type, cls)
                self.built[name] = None if may_lack else self.section(section, node, name)
        return self.built[name]

    def section(self, cls: type[T], node: Any, path: str, nulls: Collection[str] = ()) -> T:
        """Build a section; one that is no section has no usable field.

        `nulls` are fields that are null if they are absent.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        if not isinstance(node, DictConfig):
            problem = Problem("section", path, node, "a section", "", f"Set {path}.<key>=<value>")
            self.report.add(problem, broken=path)
            return _instance(cls, {name: NoValue(f"{path}.{name}") for name in fields})
        for name in map(str, node):
            if name not in fields:
                self.report.problems += nothing_reads(
                    f"{path}.{name}", raw_tree(node)[name], self.known
                )
        values: dict[str, Any] = {}
        for name, field in fields.items():
            if name in nulls and name not in node:
                values[name] = None
            else:
                values[name] = self.value(field, cls, node, f"{path}.{name}")
        if self.report.usable([path]):
            try:
                return cls(**values)
            except (TypeError, ValueError) as error:  # a subclass's __post_init__
                self.report.add(Problem("own_check", path, why=str(error)), broken=path)
        return _instance(cls, values)

    def value(self, field: dataclasses.Field[Any], cls: type, node: DictConfig, key: str) -> Any:
        """Return a field's converted value, or a NoValue, with the problem in the report."""
        try:
            for note in annotations_of(cls, field.name):
                if isinstance(note, Shared):
                    return self._shared(note, node, key)
            return self._own(field, cls, node, key)
        except Unusable:
            return NoValue(key)

    def _shared(self, note: Shared, node: DictConfig, key: str) -> Any:
        """Return the value of a shared key; refuse a copy, even an equal one.

        A role has the shared spec by `fsdp: ${fsdp}`. A recipe that sets a key below it, or a
        `++role.fsdp.key=` override, replaces the link by a copy, which later changes do not reach.
        """
        name = key.rpartition(".")[2]
        copy = raw_tree(node).get(name)
        link = f"${{{note.key}}}"
        if copy is not None and not (note.is_linked and copy == link):
            self.report.add(copied(note, key, copy, OmegaConf.select(self.cfg, note.key)))
        section, _, rest = note.key.partition(".")
        shared = self.part(section)
        return attrgetter(rest)(shared) if rest else shared

    def _own(self, field: dataclasses.Field[Any], cls: type, node: DictConfig, key: str) -> Any:
        name, hint = field.name, type_hints(cls)[field.name]
        if OmegaConf.is_missing(node, name):
            kind = type_name(hint)
            problem = Problem("missing", key, ABSENT, kind, "it is missing", f"Set {key}=<{kind}>")
            self._refuse(key, problem)
        if name not in node:
            return self._default(cls, field, hint, key)
        try:
            value = node[name]
        except OmegaConfBaseException as error:
            raw = shown(raw_tree(node)[name])
            problem = Problem(
                "unresolved", key, raw, "", f"it cannot be resolved: {reason_of(error)}"
            )
            to_itself = raw == f"${{{key}}}"
            self._refuse(key, problem if to_itself or not self._is_link(node, name) else None)
        element = element_class(hint)
        if element is not None and isinstance(value, DictConfig):
            # Absent optional fields are None, as YAML has no defaults for entries.
            nulls = [name for name, own in type_hints(element).items() if _may_be_null(own)]
            names = map(str, value)
            return {n: self.section(element, value[n], f"{key}.{n}", nulls) for n in names}
        if dataclasses.is_dataclass(hint):
            return self.section(typing.cast(type, hint), value, key)
        return self._leaf(cls, hint, node, name, key)

    def _leaf(self, cls: type, hint: Any, node: DictConfig, name: str, key: str) -> Any:
        """Return a leaf's value, converted by OmegaConf's rules and within its range."""
        typed, value, notes = structured(cls), node[name], annotations_of(cls, name)
        if value is None and CHOSEN in notes:
            return None
        try:
            if isinstance(value, DictConfig | ListConfig):
                value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
            typed[name] = value
            converted = typed[name]
            if isinstance(converted, DictConfig | ListConfig):
                converted = OmegaConf.to_object(converted)
        except (OmegaConfBaseException, OverflowError):  # an integer too large for a float
            expected = f"{type_name(hint)}{' or null' * (CHOSEN in notes)}"
            problem = Problem("type", key, value, expected)
            self._refuse(key, None if self._is_link(node, name) else problem)
        if converted is not None and not OmegaConf.is_interpolation(node, name):
            for note in notes:
                if isinstance(note, Range) and (wrong := note.problem(key, converted)):
                    self._refuse(key, wrong)
        return converted

    def _default(self, cls: type, field: dataclasses.Field[Any], hint: Any, key: str) -> Any:
        """Return the default of a field; only users' subclasses have some."""
        if field.default is not dataclasses.MISSING:
            return field.default
        if field.default_factory is not dataclasses.MISSING:
            return field.default_factory()
        place = file_of(cls.__module__) or cls.__module__
        why = f"it is missing, and {cls.__qualname__} in {place} has no default"
        remedy = f"Set +{key}=<{type_name(hint)}>"
        self._refuse(key, Problem("missing", key, ABSENT, type_name(hint), why, remedy))

    def _is_link(self, node: DictConfig, name: str) -> bool:
        """Return whether a value is only a link to a known key, which has its own report."""
        link = LINK.fullmatch(str(raw_tree(node)[name]))
        return link is not None and link[1] in self.known

    def _refuse(self, key: str, problem: Problem | None) -> NoReturn:
        self.report.broken.add(key)
        if problem is not None:
            self.report.add(problem)
        raise Unusable(key)


def copied(note: Shared, key: str, copy: Any, shared: Any) -> Problem:
    """Return the problem of a copy of a shared value."""
    if isinstance(copy, dict) and isinstance(shared, DictConfig):
        values = raw_tree(shared)
        differing = {name: value for name, value in copy.items() if value != values.get(name)}
        copy = ", ".join(f"{name}={value}" for name, value in differing.items()) or "same values"
    remedy = f"Remove {key} from the recipe or command line and set {note.key} instead"
    expected = f"no copy of the shared {note.key}"
    return Problem("copy", key, copy, expected, note.why, remedy)


def _instance(cls: type[T], values: Mapping[str, Any]) -> T:
    """Return an instance without __init__ and so without its checks: not all values are usable."""
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
    return next((option for option in options if dataclasses.is_dataclass(option)), None)


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
