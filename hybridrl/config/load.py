"""Loading: from the composed config to a typed, resolved RunConfig, or to all its problems."""

import dataclasses
import json
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hybridrl.config import schema
from hybridrl.config.checks.reward_model import REWARD_MODEL_PATH, reward_model_shape
from hybridrl.config.command.provenance import Provenance
from hybridrl.config.command.report import Report
from hybridrl.config.derive import derive
from hybridrl.config.errors import ConfigError
from hybridrl.config.keys import ADDED_GROUPS, leaves, nothing_reads
from hybridrl.config.links import LINKS, link_problems
from hybridrl.config.planner.machine import Machine
from hybridrl.config.planner.model_shape import ModelShape, model_shape
from hybridrl.config.schema import RunConfig
from hybridrl.config.schema_keys import RANGES, is_read, known_keys
from hybridrl.config.typed import Builder, circular_links, optional_class
from hybridrl.config.user_code.classes import BUILT_IN, OPTIONAL, worker_config_class
from hybridrl.config.validate import Checks, run_checks


@dataclass(frozen=True)
class Examined:
    """A config after all checks.

    Attributes:
        config: typed and resolved; complete only without problems.
        shape: the model's sizes; None if it could not be read.
        reward_shape: the reward model's sizes; None if there is none or it could not be read.
        report: every problem, and the keys without usable values.
    """

    config: RunConfig
    shape: ModelShape | None
    reward_shape: ModelShape | None
    report: Report


def examine(
    cfg: DictConfig,
    *,
    machine: Machine,
    read_model: Callable[[str], dict[str, Any]],
    provenance: Provenance,
    checks: Checks = run_checks,
) -> Examined:
    """Type, resolve and check a composed config; collects problems instead of raising.

    Args:
        cfg: as composed by Hydra, links unresolved.
        machine: nodes that the run may use.
        read_model: a model's path -> its config.json; may raise ConfigError.
        provenance: keys that the user set.
        checks: checks of the typed config.
    """
    report = Report()
    for problem in (*_top_level_problems(cfg), *link_problems(cfg)):
        report.add(problem)
    config = _typed(cfg, report)
    _check_ranges(config, cfg, report)
    derive(config, machine, report)
    shape = _shape(config, read_model, report)
    reward_shape = _reward_shape(config, read_model, report)
    checks(config, machine, shape, reward_shape, provenance, report)
    return Examined(config, shape, reward_shape, report)


def load_resolved(config: Mapping[str, Any]) -> RunConfig:
    """Return a resolved config as dataclasses, from the plain data that a run has written.

    Raises:
        ConfigError: the data has problems or unresolved values.
    """
    report = Report()
    if "${" in json.dumps(config):
        raise ConfigError("the config has a value with ${...}, expected resolved values.")
    typed = _typed(OmegaConf.create(dict(config)), report)
    if report.problems:
        raise ConfigError(*report.problems)
    return typed


def _typed(cfg: DictConfig, report: Report) -> RunConfig:
    """Return the config as dataclasses; roles with their workers' config classes."""
    classes = _role_classes(cfg, report)
    known = known_keys(cfg, classes.values())
    builder = Builder(report, known, circular_links(leaves(_raw_tree(cfg))))
    hints = typing.get_type_hints(RunConfig)
    sections: dict[str, Any] = {}
    for field in dataclasses.fields(RunConfig):
        name = field.name
        if name in LINKS:
            continue
        if optional := optional_class(hints[name]):
            value = _at(cfg, name)
            sections[name] = None if value is None else builder.section(optional, value, name)
        elif not dataclasses.is_dataclass(hints[name]):
            sections[name] = builder.field(field, hints[name], RunConfig, cfg, name)
        else:
            sections[name] = builder.section(hints[name], _at(cfg, name), name)
    for role, cls in classes.items():
        if role in OPTIONAL and _at(cfg, role) is None:
            sections[role] = None
            continue
        shared = {name: _follow(sections, target) for name, target in LINKS[role].items()}
        sections[role] = builder.section(cls, _at(cfg, role), role, shared)
    return RunConfig(**sections)


def _at(cfg: DictConfig, key: str) -> Any:
    return OmegaConf.select(cfg, key, throw_on_resolution_failure=False)


def _raw_tree(cfg: DictConfig) -> dict[Any, Any]:
    """Return the config as plain data, links unresolved."""
    tree = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(tree, dict)
    return tree


def _follow(sections: dict[str, Any], target: str) -> Any:
    first, *rest = target.split(".")
    value = sections[first]
    for name in rest:
        value = vars(value)[name]
    return value


def _role_classes(cfg: DictConfig, report: Report) -> dict[str, type[schema.RoleConfig]]:
    """Return each role's dataclass; the built-in one if its worker cannot be imported."""
    classes = {}
    for role, (_, built_in) in BUILT_IN.items():
        path = _at(cfg, f"{role}.worker")
        try:
            classes[role] = worker_config_class(role, path) if isinstance(path, str) else built_in
        except ConfigError as error:
            classes[role] = built_in
            for problem in error.problems:
                report.add(problem)
    return classes


def _top_level_problems(cfg: DictConfig) -> list[str]:
    """Find top-level keys that nothing reads; keys in links of other values are allowed."""
    tree = _raw_tree(cfg)
    read = {field.name for field in dataclasses.fields(RunConfig)}
    text = str(tree)
    problems = []
    for name in sorted(tree.keys() - read):
        if name in ADDED_GROUPS:
            problems.append(
                f"{name} is a section of its own and has no effect: its file does not begin with "
                f"'# @package _global_'.\n"
                f"Make that the first line of the file, above all comments."
            )
        elif f"${{{name}}}" not in text and f"${{{name}." not in text:
            known = [*ADDED_GROUPS, *(key for key in leaves(tree) if is_read(key))]
            problems += nothing_reads(str(name), tree[name], known)
    return problems


def _check_ranges(config: RunConfig, cfg: DictConfig, report: Report) -> None:
    """Report numbers out of range; a role's link to a number is checked where the number is set."""
    for key, allowed in RANGES.items():
        parent, _, name = key.rpartition(".")
        node = _at(cfg, parent) if parent else cfg
        linked = (
            isinstance(node, DictConfig) and name in node and OmegaConf.is_interpolation(node, name)
        )
        if node is None or linked or not report.usable([key]):
            continue
        value = _follow(vars(config), key)
        if value is not None and (problem := allowed.problem(key, value)):
            report.add(problem, broken=key)


def _shape(
    config: RunConfig, read_model: Callable[[str], dict[str, Any]], report: Report
) -> ModelShape | None:
    """Return the model's sizes; None, with the reason in the report, if it cannot be read."""
    if not report.usable(["model.path"]):
        return None
    try:
        return model_shape(read_model(config.model.path))
    except ConfigError as error:
        for problem in error.problems:
            report.add(problem, broken="model.path")
        return None


def _reward_shape(
    config: RunConfig, read_model: Callable[[str], dict[str, Any]], report: Report
) -> ModelShape | None:
    """Return the reward model's sizes; None if there is none or it cannot be read."""
    if config.reward_model is None or not report.usable([REWARD_MODEL_PATH]):
        return None
    try:
        return reward_model_shape(config.reward_model.model.path, read_model)
    except ConfigError as error:
        for problem in error.problems:
            report.add(problem, broken=REWARD_MODEL_PATH)
        return None
