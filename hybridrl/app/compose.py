"""From a command line to a checked config: what the run and the doctor do alike."""

from collections.abc import Callable, Iterator
from pathlib import Path

from omegaconf import DictConfig

from hybridrl.config.checks.installation import check_ray
from hybridrl.config.checks.reward_model import REWARD_MODEL_PATH
from hybridrl.config.choices import Init
from hybridrl.config.command.command_line import (
    CommandLine,
    Precomposed,
    names_hardware,
    precompose,
    quoted,
)
from hybridrl.config.command.provenance import Given
from hybridrl.config.errors import ConfigError
from hybridrl.config.load import Examined, examine
from hybridrl.config.planner.machine import Machine, local_machine
from hybridrl.controller.ray.head import ray_address
from hybridrl.models.resolve import is_on_hub, read_model_config, resolve_model
from hybridrl.models.vocabulary import vocabulary_problems
from hybridrl.models.weight_files import weight_problems

WEIGHTS_ADVICE = {
    "model.path": "Name a folder with all weights of the model, or set model.init=random.",
    REWARD_MODEL_PATH: "Name a folder with all weights of a reward model.",
}


def conf_dir() -> Path:
    """The folder with config.yaml: inside an installed package, else beside it."""
    package = Path(__file__).resolve().parents[1]
    packaged = package / "conf"
    return packaged if (packaged / "config.yaml").is_file() else package.parent / "conf"


def look() -> Machine:
    """What the run may use: the Ray cluster that RAY_ADDRESS names, else this machine.

    Raises:
        ConfigError: the cluster cannot be joined, or not with the Ray that is installed.
    """
    if ray_address():
        check_ray()
        from hybridrl.controller.ray.cluster_machine import cluster_machine

        return cluster_machine()
    return local_machine()


def composed(line: CommandLine, look: Callable[[], Machine]) -> Precomposed:
    """What can be composed of the line's overrides, `hardware` chosen where they name none.

    Where it cannot be chosen, that is one of the problems, and there is no config to check.
    """
    if names_hardware(line.overrides):
        return precompose(line, conf_dir())
    try:
        line.overrides.extend(hardware_overrides(look()))
    except ConfigError as error:
        # Whatever the hardware, the same groups and keys can be given.
        line.overrides.append("hardware=cpu")
        found = precompose(line, conf_dir())
        return Precomposed([*error.problems, *found.problems], None, found.overrides)
    return precompose(line, conf_dir())


def examined(cfg: DictConfig, machine: Machine, given: Given) -> Examined:
    """All checks of a composed config, but for the data's."""
    result = examine(cfg, machine=machine, read_model=read_model_config, given=given)
    if result.reward_shape is not None and result.report.usable(["model.path"]):
        config = result.config
        for problem in vocabulary_problems(config.model.path, config.reward_model.model.path):
            result.report.add(problem, broken="reward_model.model.path")
    for problem in stored_weight_problems(result, on_hub=False):
        result.report.add(problem)
    return result


def stored_weight_problems(result: Examined, *, on_hub: bool) -> Iterator[str]:
    """What is wrong with the weights of the models of a config, seen by their headers.

    Args:
        result: the examined config.
        on_hub: whether models on the hub are looked at, which have been fetched, or all others.
    """
    config, report = result.config, result.report
    models = []
    if report.usable(["model.path", "model.init"]) and config.model.init is Init.pretrained:
        models.append(("model.path", config.model.path, result.shape))
    if config.reward_model is not None:
        models.append((REWARD_MODEL_PATH, config.reward_model.model.path, result.reward_shape))
    for key, path, shape in models:
        if shape is not None and is_on_hub(path) == on_hub:
            for problem in weight_problems(resolve_model(path), shape):
                yield f"{key} = {path}: {problem}.\n{WEIGHTS_ADVICE[key]}"


def hardware_overrides(machine: Machine) -> list[str]:
    """hardware=gpu if there is a GPU, else hardware=cpu, and why.

    Raises:
        ConfigError: whether there is a GPU cannot be told.
    """
    if machine.gpu_error:
        raise ConfigError(
            f"hardware is not given, and cannot be chosen: {machine.gpu_error}.\n"
            f"Mend the driver, or say hardware=cpu, with which a run is many times slower.\n"
            f"To plan a run for another machine, say hardware=gpu cluster.gpus_per_node=N "
            f"run.dry=true."
        )
    address = ray_address()
    where = f"the Ray cluster at {address}" if address else "this machine"
    reason = f"{where} has {machine.describe()}"
    name = "gpu" if machine.gpus else "cpu"
    return [f"hardware={name}", f"hardware.reason={quoted(reason)}"]
