"""Composition and examination of a config, for runs, the doctor and evaluations."""

from collections.abc import Callable, Iterator
from pathlib import Path

from omegaconf import DictConfig

from hybridrl.config.checks.checkpoint import AUTO, NONE
from hybridrl.config.checks.frozen_models import REWARD_MODEL_PATH
from hybridrl.config.checks.installation import check_ray
from hybridrl.config.choices import Init
from hybridrl.config.command.command_line import CommandLine
from hybridrl.config.command.input_errors import expanded
from hybridrl.config.command.overrides import (
    Precomposed,
    Underlay,
    names_hardware,
    precompose,
    quoted,
)
from hybridrl.config.command.provenance import Provenance
from hybridrl.config.errors import ConfigError, Problem
from hybridrl.config.load import Examined, examine
from hybridrl.config.planner.machine import Machine, local_machine
from hybridrl.config.schema import RunConfig
from hybridrl.controller.ray.head import ray_address
from hybridrl.models.resolve import absolute_path, is_on_hub, read_model_config, resolve_model
from hybridrl.models.vocabulary import vocabulary_problems
from hybridrl.models.weight_files import weight_problems

OTHER_FOLDER = "Set it to a folder with all weights."
WEIGHTS_ADVICE = {
    "model.path": "Set model.path to a folder with all weights, or set model.init=random.",
    REWARD_MODEL_PATH: "Set it to a folder with all weights of a reward model.",
}


def conf_dir() -> Path:
    """Return the folder with config.yaml: inside an installed package, else beside it."""
    package = Path(__file__).resolve().parents[1]
    packaged = package / "conf"
    return packaged if (packaged / "config.yaml").is_file() else package.parent / "conf"


def find_machine() -> Machine:
    """Return the Ray cluster of RAY_ADDRESS, else this machine; ConfigError if it is not there."""
    if ray_address():
        check_ray()
        from hybridrl.controller.ray.ray_probes import cluster_machine

        return cluster_machine()
    return local_machine()


def composed(
    line: CommandLine, find_machine: Callable[[], Machine], underlay: Underlay | None = None
) -> Precomposed:
    """Compose the line's overrides; choose `hardware` if they do not.

    If it cannot be chosen, that is one of the problems, and there is no config.
    """
    problems: list[Problem] = []
    if not names_hardware(line.overrides):
        try:
            line.overrides.extend(hardware_overrides(find_machine()))
        except ConfigError as error:
            problems = error.problems
            # Groups and keys are the same for all hardware.
            line.overrides.append("hardware=cpu")
    composition = precompose(line, conf_dir(), underlay)._replace(machine=find_machine)
    if not problems:
        return composition
    return Precomposed([*problems, *composition.problems], None, composition.overrides)


def examine_config(cfg: DictConfig, machine: Machine, provenance: Provenance) -> Examined:
    """Run all checks of a composed config, except those of the data."""
    result = examine(cfg, machine=machine, read_model=read_model_config, provenance=provenance)
    if result.report.usable(["model.path"]):
        policy = result.config.model.path
        for model in result.frozen:
            if not model.own_tokens:
                for problem in vocabulary_problems(policy, model.path, model.key):
                    result.report.add(problem, broken=model.key)
    for text in stored_weight_problems(result, on_hub=False):
        result.report.add(text)
    return result


def stored_weight_problems(result: Examined, *, on_hub: bool) -> Iterator[str]:
    """Check the weight files of a config's models, by their headers.

    Those from the hub are checked after their download, apart from all others.
    """
    config, report = result.config, result.report
    models = []
    if report.usable(["model.path", "model.init"]) and config.model.init is Init.pretrained:
        models.append(("model.path", config.model.path, result.shape))
    models += [(model.key, model.path, model.shape) for model in result.frozen if model.has_weights]
    for key, path, shape in models:
        if shape is not None and is_on_hub(path) == on_hub:
            for problem in weight_problems(resolve_model(path), shape):
                yield f"{key} = {path}: {problem}.\n{WEIGHTS_ADVICE.get(key, OTHER_FOLDER)}"


def make_paths_absolute(config: RunConfig) -> None:
    """Make the paths of models and of a checkpoint absolute: they outlast this directory."""
    # Workers may have another current directory, and so may a resumed run.
    config.model.path = absolute_path(config.model.path)
    if config.reward_model is not None:
        config.reward_model.model.path = absolute_path(config.reward_model.model.path)
    if (teacher := config.teacher) is not None:
        paths = {name: absolute_path(path) for name, path in teacher.paths.items()}
        teacher.models = paths.get("", paths)
    if config.resume not in (AUTO, NONE):  # and outputs/latest will be this run
        config.resume = str(expanded(config.resume).resolve())


def hardware_overrides(machine: Machine) -> list[str]:
    """Return hardware=gpu if there is a GPU, else hardware=cpu, with the reason."""
    if machine.gpu_error:
        remedy = "Repair this, or set hardware=cpu, which is many times slower.\nTo plan a run for "
        remedy += "another machine, set hardware=gpu cluster.gpus_per_node=N run.dry=true"
        why = f"it is not set and cannot be chosen: {machine.gpu_error}"
        raise ConfigError(Problem("hardware", "hardware", why=why, remedy=remedy))
    address = ray_address()
    where = f"the Ray cluster at {address}" if address else "this machine"
    reason = f"{where} has {machine.describe()}"
    name = "gpu" if machine.gpus else "cpu"
    return [f"hardware={name}", f"hardware.reason={quoted(reason)}"]
