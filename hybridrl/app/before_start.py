"""Checks of a command line before Hydra starts a run or a sweep, and the folder made after them."""

import logging
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

from hydra.errors import HydraException

from hybridrl.app.checked import Checked
from hybridrl.app.compose import composed, examine_config, find_machine
from hybridrl.app.data import examine_data
from hybridrl.app.folders import Claim, claim_folder, template
from hybridrl.config.checks.checkpoint import auto_problem
from hybridrl.config.checks.installation import check_installation
from hybridrl.config.choices import Accelerator
from hybridrl.config.command.command_line import RUN_DIR, SWEEP_DIR, CommandLine
from hybridrl.config.command.input_errors import INPUT_ERRORS, problem_of, reason_of
from hybridrl.config.command.overrides import Precomposed, quoted
from hybridrl.config.command.provenance import Provenance, provenance_of, recipe_files
from hybridrl.config.command.secrets import config_secrets
from hybridrl.config.errors import ConfigError, Problem, as_problem
from hybridrl.config.load import is_on
from hybridrl.config.variants import variant_problems
from hybridrl.controller.output import guard_logging
from hybridrl.controller.ray.head import ray_address
from hybridrl.distributed.background import run_in_background
from hybridrl.trainer.tracking.provenance import command_of

log = logging.getLogger(__name__)

# Key of a dry run.
DRY = "run.dry"
# Hydra's plugin that searches with Optuna, and its key for what is better.
OPTUNA, DIRECTION = "hydra_optuna_sweeper", "hydra.sweeper.direction"
# Hydra's launcher of Slurm jobs.
SLURM = "submitit_launcher.SlurmLauncher"


def examine(
    composition: Precomposed, *, in_sweep: bool = False, reads_data: bool = False
) -> Checked:
    """Check a config; its data if asked for, or if it has problems or is dry. See the report."""
    cfg, hydra = composition.cfg, composition.hydra
    assert cfg is not None and hydra is not None
    is_dry = is_on(cfg, DRY)
    if not is_dry:  # first: wrong versions break the imports of other checks
        on_cpu = cfg.hardware.accelerator == Accelerator.cpu
        accelerator = Accelerator.cpu if on_cpu else Accelerator.gpu
        rollout = cfg.rollout
        options = {"exact": rollout.exact, "weights": rollout.weights}
        check_installation(accelerator, rollout.sleep, **options)
    machine, runtime = (composition.machine or find_machine)(), hydra.runtime
    overrides = [
        o for o in composition.overrides if not o.lstrip("+~").startswith(("hydra.", "hydra/"))
    ]
    recipes = recipe_files(runtime.choices, runtime.config_sources)
    provenance = provenance_of(overrides, recipes)
    # In a sweep a key without effect is only a warning: some jobs may use it.
    result = examine_config(cfg, machine, Provenance() if in_sweep else provenance)
    reads_data = reads_data or bool(result.report.problems) or is_dry
    prompts = examine_data(result) if reads_data else None
    if in_sweep and not reads_data:
        for text in variant_problems(result.config, provenance):
            log.warning("%s", text)
    return Checked(result, machine, overrides, command_of(overrides, runtime), prompts)


def compose_line(line: CommandLine, *, guards_output: bool = True) -> Precomposed:
    """Compose the config as Hydra will; add `hardware` to `line` if it is not chosen.

    With `guards_output` what the further checks print hides the config's secrets.

    Raises:
        ConfigError: every problem of the overrides, the config and its data.
    """
    # Without NVIDIA's daemon nvidia-smi takes a second; Ray's cluster is joined only when needed.
    joins = ray_address() is not None
    look = cache(find_machine) if joins else run_in_background(find_machine, name="look").result
    composition = composed(line, look)
    if composition.problems:
        if guards_output and composition.cfg is not None:
            guard_logging(config_secrets(composition.cfg))
        raise ConfigError(*composition.problems, *_further_problems(line, composition))
    return composition


def before_start(
    line: CommandLine, composition: Precomposed, dry_run: Callable[[Checked, Path], None]
) -> tuple[Claim, Checked | None] | None:
    """Make the folder of a run or sweep, and check the run; the jobs of a sweep check themselves.

    Nothing is left of a run with problems. Returns None after a dry run: `dry_run` has printed
    its plan.
    """
    assert composition.cfg is not None and composition.hydra is not None
    logging.basicConfig(stream=sys.stdout, format="%(message)s")  # until Hydra's
    guard_logging(config_secrets(composition.cfg))
    key = SWEEP_DIR if line.sweeps else RUN_DIR
    problem = auto_problem(composition.cfg.get("resume"), key, template(composition.hydra, key))
    problems = [] if problem is None else [problem]
    if str(composition.hydra.launcher.get("_target_")).endswith(SLURM) and not shutil.which("srun"):
        why = "this machine has no srun of Slurm"
        problems.append(Problem("no_slurm", "hydra/launcher=submitit_slurm", why=why))
    try:
        claimed = claim_folder(composition, key)
    except INPUT_ERRORS as error:
        raise ConfigError(*problems, *problems_around(error, line, composition)) from error
    try:
        checked = None if line.sweeps else examine(composition)
        problems += checked.result.report.problems if checked is not None else []
        if problems:
            raise ConfigError(*problems)
        if checked is not None and checked.result.config.run.dry:
            dry_run(checked, claimed.folder)
            claimed.release()
            return None
    except BaseException:
        claimed.release()
        raise
    composition.hydra.run.dir = str(claimed.folder)
    line.overrides.append(f"{key}={quoted(str(claimed.folder))}")
    if OPTUNA in str(composition.hydra.sweeper.get("_target_")):
        logging.getLogger("alembic").setLevel(logging.WARNING)  # lists its plugins
        if not any(text.lstrip("+").startswith(DIRECTION) for text in line.overrides):
            line.overrides.append(f"{DIRECTION}=maximize")  # its default suits a loss
    return claimed, checked


def _further_problems(line: CommandLine, composition: Precomposed) -> list[Problem]:
    """Return the problems of the composed config and its data; none of a sweep: its jobs check."""
    if composition.cfg is None or line.sweeps:
        return []
    try:
        return examine(composition, reads_data=True).result.report.problems
    except ConfigError as error:
        return error.problems


def problems_around(
    error: BaseException, line: CommandLine, composition: Precomposed | None
) -> list[Problem]:
    """Return the problem of an error of Hydra, and further problems of the config."""
    further = [] if composition is None else _further_problems(line, composition)
    if isinstance(error.__cause__, OSError):  # logging's ValueError has the reason there
        error = error.__cause__
    # Hydra's error of a missing file is an OSError, too.
    of_system = isinstance(error, OSError | UnicodeEncodeError)
    of_system &= not isinstance(error, HydraException)
    if not (of_system or "null byte" in str(error)):
        # An unresolvable value is also part of the directory's name.
        return further or [as_problem(problem_of(error))]
    key = SWEEP_DIR if line.sweeps else RUN_DIR
    why = f"the directory cannot be created or written: {reason_of(error)}"
    return [
        Problem("directory", key, why=why, remedy=f"Set {key}=<a writable directory>"),
        *further,
    ]
