"""Entry point of training: compose, check, run.

    python -m hybridrl.main +recipe=gsm8k_ppo                          one run
    python -m hybridrl.main +recipe=gsm8k_ppo -m seed=1,2              a sweep
    python -m hybridrl.main +recipe=gsm8k_ppo run.dry=true             only the plan
    python -m hybridrl.main +recipe=gsm8k_ppo --cfg job                the composed config

Exit codes: 0 done, 1 failed, 2 the config is wrong, 75 SIGTERM or SIGHUP with a checkpoint written,
129 SIGHUP, 130 Ctrl-C, 143 SIGTERM. Heavy imports follow the checks of the config, so that config
errors appear at once.
"""

import logging
import math
import os
import sys
import time
from functools import partial
from pathlib import Path

import hydra
import psutil
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from hybridrl.app.compose import (
    composed,
    conf_dir,
    examine_config,
    find_machine,
    stored_weight_problems,
)
from hybridrl.app.launch import Prepared, check_data, examine_data, train_with_restarts
from hybridrl.app.process import (
    EXIT_CONFIG,
    EXIT_FAILED,
    exit_codes,
    set_up_process,
    show_problems,
)
from hybridrl.app.sweep import SWEEP_CONFIG, JobResult
from hybridrl.config.checks.checkpoint import AUTO, auto_problem
from hybridrl.config.checks.effects import effect_problems
from hybridrl.config.checks.installation import check_installation
from hybridrl.config.choices import Accelerator
from hybridrl.config.command.command_line import CONFIG_NAME, CommandLine, Precomposed, parse_argv
from hybridrl.config.command.input_errors import INPUT_ERRORS, problem_of, reason_of
from hybridrl.config.command.provenance import Provenance, provenance_of, recipe_files
from hybridrl.config.command.secrets import (
    argument_without_secret,
    config_secrets,
    hide_in_files,
    without_secrets,
)
from hybridrl.config.errors import ConfigError
from hybridrl.config.planner.plan_text import plan
from hybridrl.controller.calls import SetupTimes
from hybridrl.controller.errors import WorkerError
from hybridrl.controller.output import guard_logging, guard_standard_output
from hybridrl.models.resolve import absolute_path, model_folder, resolve_model
from hybridrl.trainer.errors import RunStopped

log = logging.getLogger(__name__)


def main() -> None:
    """Run the command line; exits by SystemExit unless all goes well."""
    set_up_process()
    guard_standard_output()
    # Hydra raises its errors instead of printing tracebacks.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    line = parse_argv(sys.argv[1:])
    with exit_codes():
        found = _composed(line)
        sys.argv = [sys.argv[0], *line.overrides, *line.options]
        command = hydra.main(
            version_base="1.3", config_path=str(conf_dir()), config_name=CONFIG_NAME
        )(job)
        try:
            command()
        except INPUT_ERRORS as error:
            raise ConfigError(*_problems_around(error, line, found)) from error


def job(cfg: DictConfig) -> float:
    """Run Hydra's task: one run, or one job of a sweep, whose failure is a result."""
    start = time.time()
    secrets = config_secrets(cfg)
    hide_in_files(_written_by_hydra(), secrets)
    guard_logging(secrets)
    try:
        metric, error_text, code = run(cfg), "", 0
    except ConfigError as error:
        show_problems(error)
        metric, error_text, code = math.nan, "; ".join(error.problems), EXIT_CONFIG
    except (WorkerError, RunStopped) as error:  # complete message
        log.error("%s", error)
        metric, error_text, code = math.nan, str(error), EXIT_FAILED
    # Outermost frame: after any error, user code that exits included, the next job must run.
    except (Exception, SystemExit) as error:
        log.exception("The run failed")
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        metric, error_text, code = math.nan, f"{type(error).__name__}: {error}", EXIT_FAILED
    if _in_sweep():
        state, error_text = HydraConfig.get(), without_secrets(error_text, secrets)
        JobResult(
            job=int(state.job.num),
            overrides=[argument_without_secret(override) for override in _task_overrides()],
            status="failed" if code else "dry" if cfg.run.dry else "ok",
            metric=metric if math.isfinite(metric) else None,
            seconds=time.time() - start,
            directory=state.runtime.output_dir,
            error=error_text.splitlines()[0] if error_text else "",
        ).write()
    elif code:
        sys.exit(code)
    return metric


def _in_sweep() -> bool:
    return HydraConfig.get().mode == RunMode.MULTIRUN


def _task_overrides() -> list[str]:
    """Return the job's overrides as typed: Hydra's list would resolve their links."""
    overrides = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    assert isinstance(overrides, list)
    return [str(override) for override in overrides]


def _written_by_hydra() -> list[Path]:
    """Return the files in which Hydra has written a job's config."""
    state = HydraConfig.get()
    files: list[Path] = []
    if state.output_subdir is not None:
        files += (Path(state.runtime.output_dir) / state.output_subdir).glob("*")
    if _in_sweep():
        files += Path(state.sweep.dir).glob(SWEEP_CONFIG)
    return files


def run(cfg: DictConfig) -> float:
    """Check the composed config, then train; return the final eval/accuracy (NaN of a dry run).

    ConfigError has every problem of config and data, before any worker is started.
    """
    state = HydraConfig.get()
    overrides = _task_overrides()
    recipes = recipe_files(state.runtime.choices, state.runtime.config_sources)
    provenance = provenance_of(overrides, recipes)
    in_sweep = _in_sweep()
    setup = SetupTimes(time.time() if in_sweep else psutil.Process().create_time())
    if not cfg.run.dry:  # first: wrong versions break the imports of other checks
        on_cpu = cfg.hardware.accelerator == Accelerator.cpu
        check_installation(Accelerator.cpu if on_cpu else Accelerator.gpu)
    machine = find_machine()
    # In a sweep a key without effect is only a warning: some jobs may use it.
    result = examine_config(cfg, machine, Provenance() if in_sweep else provenance)
    key = "hydra.sweep.dir" if in_sweep else "hydra.run.dir"
    if result.report.usable(["resume"]):
        problem = auto_problem(result.config, state.overrides.hydra, key)
        if problem is not None:
            result.report.add(problem)
    if result.report.problems or cfg.run.dry:
        check_data(result)
    config, shape, reward_shape = result.config, result.shape, result.reward_shape
    if in_sweep:
        for text in effect_problems(config, provenance):
            log.warning("%s", text)
    assert shape is not None
    if config.run.dry:
        console = Console()
        table = plan(config, shape, result.machine, reward_shape)
        (console if console.is_terminal else Console(width=160)).print(table)
        return math.nan
    model_folder(config.model)  # downloads once, not in every worker
    # Workers may have another current directory, and so may a resumed run.
    config.model.path = absolute_path(config.model.path)
    if config.reward_model is not None:
        resolve_model(config.reward_model.model.path)
        config.reward_model.model.path = absolute_path(config.reward_model.model.path)
    if problems := [*stored_weight_problems(result, on_hub=True)]:
        raise ConfigError(*problems)
    from hybridrl.doctor.preflight import preflight  # heavy

    prepared = Prepared(result, machine, setup, partial(preflight, result, machine, overrides))
    prepared.owns_checkpoints = config.resume == AUTO
    return train_with_restarts(prepared, Path(state.runtime.output_dir))


def _composed(line: CommandLine) -> Precomposed | None:
    """Compose the config as Hydra will; add `hardware` to `line` if it is not chosen.

    Returns None for another primary config, or if nothing is composed.
    """
    if not line.composes:
        return None
    found = composed(line, find_machine)
    if found.problems:
        raise ConfigError(*found.problems, *_further_problems(line, found))
    return found


def _further_problems(line: CommandLine, found: Precomposed) -> list[str]:
    """Return the problems of the composed config and its data; none of a sweep: its jobs check."""
    if found.cfg is None or line.args.multirun:
        return []
    guard_logging(config_secrets(found.cfg))
    try:
        result = examine_config(found.cfg, find_machine(), provenance_of(found.overrides, []))
    except ConfigError as error:
        return error.problems
    examine_data(result)
    return result.report.problems


def _problems_around(
    error: BaseException, line: CommandLine, found: Precomposed | None
) -> list[str]:
    """Return the problem of Hydra's error, and further problems of the config."""
    further = _further_problems(line, found) if found is not None else []
    if isinstance(error.__cause__, OSError):  # logging's ValueError has the reason there
        error = error.__cause__
    if isinstance(error, OSError | UnicodeEncodeError) or "null byte" in str(error):
        key = "hydra.sweep.dir" if line.args.multirun else "hydra.run.dir"
        folder = (
            f"{key}: the directory cannot be created or written: {reason_of(error)}.\n"
            f"Set {key}=<a writable directory>."
        )
        return [folder, *further]
    # An unresolvable value is also part of the directory's name.
    return further or [problem_of(error)]


if __name__ == "__main__":
    main()
