"""Loading: from the composed config to a typed, resolved RunConfig, or to all its problems."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from omegaconf import BooleanNode, DictConfig, OmegaConf, ValueNode
from omegaconf.errors import OmegaConfBaseException

from hybridrl.config.annotations import Unusable
from hybridrl.config.checks.frozen_models import (
    frozen_model,
    named_models,
    policy_shape,
)
from hybridrl.config.checks.memory import memory_problems
from hybridrl.config.command.provenance import Provenance
from hybridrl.config.derive import (
    choose_for_memory,
    choose_sharing,
    derive,
    machine_of,
    name_adapted_layers,
)
from hybridrl.config.errors import ConfigError, Problem, Report
from hybridrl.config.keys import ADDED_GROUPS, leaves, nothing_reads, raw_tree
from hybridrl.config.planner.description import is_described
from hybridrl.config.planner.fitting import Change
from hybridrl.config.planner.machine import Machine
from hybridrl.config.planner.shape import Frozen, FrozenModel, ModelShape, NamedModel
from hybridrl.config.reward_parts import set_parts
from hybridrl.config.schema import RunConfig
from hybridrl.config.schema_keys import is_read, known_keys, without_shared
from hybridrl.config.typed import Builder
from hybridrl.config.user_code.classes import role_classes
from hybridrl.config.user_code.files import make_files_absolute
from hybridrl.config.validate import run, run_checks

# Sizes of the policy, or a frozen model with its own.
Shape = TypeVar("Shape", ModelShape, FrozenModel)


@dataclass(frozen=True)
class Examined:
    """A config after all checks.

    Attributes:
        config: typed and resolved; complete only without problems.
        shape: the model's sizes; None if it could not be read.
        frozen: the reward model and teachers, as far as they could be read.
        report: every problem, and the keys without usable values.
        machine: the nodes; of a dry run those of cluster.gpu_memory_gb.
        chosen: settings that were null and are not the fastest, for the GPUs' memory.
        trains: false for an evaluation.
    """

    config: RunConfig
    shape: ModelShape | None
    frozen: Frozen
    report: Report
    machine: Machine
    chosen: list[Change]
    trains: bool


def examine(
    cfg: DictConfig,
    *,
    machine: Machine,
    read_model: Callable[[str], dict[str, Any]],
    provenance: Provenance,
    trains: bool = True,
    checks_memory: bool = True,
) -> Examined:
    """Type, resolve and check a composed config; collects problems instead of raising.

    Args:
        cfg: as composed by Hydra, links unresolved.
        machine: nodes that the run may use.
        read_model: a model's path -> its config.json; may raise ConfigError.
        provenance: keys that the user set.
        trains: false for an evaluation.
        checks_memory: false if the caller judges memory itself.
    """
    report = Report()
    report.problems += _top_level_problems(cfg)
    config = typed_run(cfg, report)
    machine = machine_of(config, machine)
    derive(config, machine, report)

    named = list[NamedModel]()
    with suppress(Unusable):  # a path is missing
        named = named_models(config)

    def read(path: str) -> dict[str, Any]:
        known = read_model(path)
        if report.problems and not is_described(known):  # these do not wait for a derivation
            report.broken |= {"model.path", *(one.key for one in named)}
            raise Unusable
        return known

    shape = _read(lambda: policy_shape(config.model.path, read), report, broken="model.path")
    name_adapted_layers(config, shape)
    models = [_read(partial(frozen_model, one, read), report, broken=one.key) for one in named]
    frozen = [model for model in models if model is not None]
    choose_sharing(config, shape, frozen)
    chosen = choose_for_memory(config, shape if trains else None, frozen, machine)
    run_checks(config, machine, shape, frozen, provenance, report, trains=trains)
    if trains and checks_memory and shape is not None:
        run([memory_problems(config, shape, machine, frozen)], report)
    return Examined(config, shape, frozen, report, machine, chosen, trains)


def load_resolved(config: Mapping[str, Any]) -> RunConfig:
    """Return a resolved config as dataclasses, from the plain data that a run has written.

    Raises:
        ConfigError: the data has problems or unresolved values.
    """
    report = Report()
    if "${" in json.dumps(config):
        raise ConfigError("the config has a value with ${...}, expected resolved values.")
    typed = typed_run(without_shared(config), report)
    if report.problems:
        raise ConfigError(*report.problems)
    return typed


def is_on(cfg: DictConfig, key: str) -> bool:
    """Return a switch of an untyped config: `off` is false, too."""
    return bool(early_value(cfg, key, BooleanNode))


def early_value(cfg: DictConfig, key: str, kind: Callable[[Any], ValueNode]) -> Any:
    """Return a value of an untyped config as `typed_run` reads it.

    It is None if it is of another kind, which is a problem of the config, reported elsewhere.
    """
    try:
        return kind(OmegaConf.select(cfg, key))._value()
    except OmegaConfBaseException:
        return None


def typed_run(cfg: DictConfig, report: Report) -> RunConfig:
    """Return the config as dataclasses; roles with their workers' config classes."""
    classes, problems = role_classes(cfg)
    report.problems += problems
    set_parts(cfg, report)
    config = Builder(cfg, classes, known_keys(cfg, classes), report).run()
    if report.broken and not report.problems:
        keys = ", ".join(sorted(report.broken))
        report.add(Problem("links", keys, why="they link to each other", remedy="Set one of them"))
    make_files_absolute(vars(config))
    return config


def _top_level_problems(cfg: DictConfig) -> list[Problem]:
    """Find top-level keys that nothing reads; keys in links of other values are allowed."""
    tree = raw_tree(cfg)
    read = {field.name for field in dataclasses.fields(RunConfig)}
    text = str(tree)
    problems: list[Problem] = []
    for name in sorted(tree.keys() - read):
        if name in ADDED_GROUPS:
            why = "its file does not begin with '# @package _global_', so it has no effect"
            remedy = "Make that the first line of the file, above all comments"
            problems.append(Problem("package_line", str(name), why=why, remedy=remedy))
        elif f"${{{name}}}" not in text and f"${{{name}." not in text:
            known = [*ADDED_GROUPS, *(key for key in leaves(tree) if is_read(key))]
            problems += nothing_reads(str(name), tree[name], known)
    return problems


def _read(read: Callable[[], Shape], report: Report, *, broken: str) -> Shape | None:
    """Return a model's sizes; None if it cannot be read, with the reason in the report."""
    with suppress(Unusable):
        try:
            return read()
        except ConfigError as error:
            for problem in error.problems:
                report.add(problem, broken=broken)
    return None
