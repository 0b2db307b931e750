"""Checks of a command line before Hydra starts a run or a sweep, and the folder made after them."""

import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from hydra.conf import RuntimeConf
from omegaconf import DictConfig
from rich.console import Console

from hybridrl.app.compose import composed, examine_config, find_machine
from hybridrl.app.folders import Claim, claim, set_up_hydra, template
from hybridrl.app.launch import examine_data
from hybridrl.config.checks.checkpoint import NEW_EACH_TIME, auto_problem
from hybridrl.config.checks.effects import effect_problems
from hybridrl.config.checks.installation import check_installation
from hybridrl.config.choices import Accelerator
from hybridrl.config.command.command_line import (
    RUN_DIR,
    SWEEP_DIR,
    CommandLine,
    Precomposed,
    quoted,
)
from hybridrl.config.command.input_errors import INPUT_ERRORS, problem_of, reason_of
from hybridrl.config.command.provenance import Provenance, provenance_of, recipe_files
from hybridrl.config.command.secrets import config_secrets
from hybridrl.config.errors import ConfigError
from hybridrl.config.load import Examined
from hybridrl.config.planner.machine import Machine
from hybridrl.config.planner.plan_text import plan
from hybridrl.controller.output import guard_logging

if TYPE_CHECKING:
    from hybridrl.data.sources.prompts import PromptSets

log = logging.getLogger(__name__)

# Hydra's plugin that searches with Optuna, and its key for what is better.
OPTUNA, DIRECTION = "hydra_optuna_sweeper", "hydra.sweeper.direction"


class Checked(NamedTuple):
    """A config after its checks, and the machine that it was checked for; `prompts` if read."""

    result: Examined
    machine: Machine
    prompts: "PromptSets | None" = None


def examine(
    cfg: DictConfig,
    overrides: Sequence[str],
    runtime: DictConfig | RuntimeConf,
    *,
    in_sweep: bool = False,
    reads_data: bool = False,
) -> Checked:
    """Check a config; its data if asked for, or if it has problems or is dry. See the report."""
    if not cfg.run.dry:  # first: wrong versions break the imports of other checks
        on_cpu = cfg.hardware.accelerator == Accelerator.cpu
        check_installation(Accelerator.cpu if on_cpu else Accelerator.gpu)
    machine = find_machine()
    recipes = recipe_files(runtime.choices, runtime.config_sources)
    provenance = provenance_of(overrides, recipes)
    # In a sweep a key without effect is only a warning: some jobs may use it.
    result = examine_config(cfg, machine, Provenance() if in_sweep else provenance)
    if reads_data or result.report.problems or cfg.run.dry:
        return Checked(result, machine, examine_data(result))
    if in_sweep:
        for text in effect_problems(result.config, provenance):
            log.warning("%s", text)
    return Checked(result, machine)


def show_plan(checked: Checked) -> None:
    """Print the plan of a dry run."""
    from hybridrl.trainer.tracking.header import input_lines

    console, result, prompts = Console(), checked.result, checked.prompts
    assert result.shape is not None and prompts is not None
    inputs = input_lines(result.config, prompts.data_sets, prompts.template)
    table = plan(result.config, result.shape, result.machine, result.reward_shape, inputs)
    (console if console.is_terminal else Console(width=160)).print(table)


def compose_line(line: CommandLine) -> Precomposed | None:
    """Compose the config as Hydra will; add `hardware` to `line` if it is not chosen.

    Returns None for another primary config, or if nothing is composed.
    """
    if not line.composes:
        return None
    found = composed(line, find_machine)
    if found.problems:
        raise ConfigError(*found.problems, *_further_problems(line, found))
    return found


def before_start(line: CommandLine, found: Precomposed) -> Claim | None:
    """Check a run and make its folder, or a sweep's; None after a dry run, whose plan is printed.

    Nothing is left of a run with problems. The jobs of a sweep check themselves.
    """
    assert found.cfg is not None and found.hydra is not None
    logging.basicConfig(stream=sys.stdout, format="%(message)s")  # until Hydra's
    guard_logging(config_secrets(found.cfg))
    key = SWEEP_DIR if line.sweeps else RUN_DIR
    named = template(found, key)
    problem = auto_problem(found.cfg.resume, key, named)
    problems = [] if problem is None else [problem]
    try:
        folder = set_up_hydra(found, key)
    except INPUT_ERRORS as error:
        # An unresolvable value is also part of the directory's name.
        problems += _further_problems(line, found)
        raise ConfigError(*(problems or [problem_of(error)])) from error
    examined = None if line.sweeps else examine(found.cfg, found.overrides, found.hydra.runtime)
    problems += examined.result.report.problems if examined is not None else []
    try:
        claimed = claim(folder, is_new=NEW_EACH_TIME in named)
    except (OSError, ValueError) as error:
        raise ConfigError(_directory_problem(key, error), *problems) from error
    if problems:
        claimed.release()
        raise ConfigError(*problems)
    if examined is not None and found.cfg.run.dry:
        claimed.release()
        show_plan(examined)
        return None
    line.overrides.append(f"{key}={quoted(str(claimed.folder))}")
    if OPTUNA in str(found.hydra.sweeper.get("_target_")):
        logging.getLogger("alembic").setLevel(logging.WARNING)  # lists its plugins
        if not any(text.lstrip("+").startswith(DIRECTION) for text in line.overrides):
            line.overrides.append(f"{DIRECTION}=maximize")  # its default suits a loss
    return claimed


def _further_problems(line: CommandLine, found: Precomposed) -> list[str]:
    """Return the problems of the composed config and its data; none of a sweep: its jobs check."""
    if found.cfg is None or found.hydra is None or line.sweeps:
        return []
    guard_logging(config_secrets(found.cfg))
    try:
        checked = examine(found.cfg, found.overrides, found.hydra.runtime, reads_data=True)
    except ConfigError as error:
        return error.problems
    return checked.result.report.problems


def problems_around(
    error: BaseException, line: CommandLine, found: Precomposed | None
) -> list[str]:
    """Return the problem of an error of Hydra, and further problems of the config."""
    further = _further_problems(line, found) if found is not None else []
    if isinstance(error.__cause__, OSError):  # logging's ValueError has the reason there
        error = error.__cause__
    if isinstance(error, OSError | UnicodeEncodeError) or "null byte" in str(error):
        return [_directory_problem(SWEEP_DIR if line.sweeps else RUN_DIR, error), *further]
    return further or [problem_of(error)]


def _directory_problem(key: str, error: BaseException) -> str:
    return (
        f"{key}: the directory cannot be created or written: {reason_of(error)}.\n"
        f"Set {key}=<a writable directory>."
    )
