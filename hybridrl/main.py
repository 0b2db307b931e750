"""The one command: compose, check, run, and leave the machine as it was.

    python -m hybridrl.main +recipe=gsm8k_ppo                          one run
    python -m hybridrl.main +recipe=gsm8k_ppo -m seed=1,2              a sweep
    python -m hybridrl.main +recipe=gsm8k_ppo run.dry=true             the plan alone
    python -m hybridrl.main +recipe=gsm8k_ppo --cfg job                the composed config

Exit codes: 0 done, 1 failed, 2 the config is wrong, 75 SIGTERM or SIGHUP, and a checkpoint was
written, 129 SIGHUP, 130 Ctrl-C, 143 SIGTERM. Nothing heavy is imported before the config has passed
its checks, so that a wrong key is answered at once.
"""

import logging
import math
import os
import sys
import time
from functools import partial
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from hybridrl.app.compose import composed, conf_dir, examined, look, stored_weight_problems
from hybridrl.app.launch import Prepared, check_data, look_at_data, train_with_restarts
from hybridrl.app.process import (
    EXIT_CONFIG,
    EXIT_FAILED,
    exit_codes,
    set_up_process,
    show_problems,
)
from hybridrl.app.setup_times import SetupTimes, program_start
from hybridrl.app.sweep import SWEEP_CONFIG, JobResult, finite
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
from hybridrl.controller.errors import WorkerError
from hybridrl.controller.output import guard_logging, guard_standard_output
from hybridrl.models.resolve import absolute_path, model_folder, resolve_model
from hybridrl.trainer.errors import RunStopped

log = logging.getLogger(__name__)


def main() -> None:
    """The command: everything argv says; leaves by SystemExit unless all went well."""
    set_up_process()
    guard_standard_output()
    # Hydra's errors come back from it, instead of their tracebacks to the terminal.
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
    """Hydra's task: one run, or one job of a sweep, where a failure is a result like others."""
    state = HydraConfig.get()
    in_sweep = state.mode == RunMode.MULTIRUN
    start = time.time()
    secrets = config_secrets(cfg)
    hide_in_files(_written_by_hydra(), secrets)
    guard_logging(secrets)
    try:
        metric, error_text, code = run(cfg), "", 0
    except ConfigError as error:
        show_problems(error)
        metric, error_text, code = math.nan, "; ".join(error.problems), EXIT_CONFIG
    except (WorkerError, RunStopped) as error:  # tells the whole story itself
        log.error("%s", error)
        metric, error_text, code = math.nan, str(error), EXIT_FAILED
    # The outermost frame: whatever it is, code of the user's that exits included, the next job must
    # run, and this one has failed.
    except (Exception, SystemExit) as error:
        log.exception("The run failed")
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        metric, error_text, code = math.nan, f"{type(error).__name__}: {error}", EXIT_FAILED
    if in_sweep:
        status = "failed" if code else "dry" if cfg.run.dry else "ok"
        told = without_secrets(error_text, secrets)
        _result(status, metric, time.time() - start, told).write()
    elif code:
        sys.exit(code)
    return metric


def _task_overrides() -> list[str]:
    """The job's overrides as typed: Hydra's list would resolve links in them, or fail to."""
    overrides = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    assert isinstance(overrides, list)
    return [str(override) for override in overrides]


def _written_by_hydra() -> list[Path]:
    """The files in which Hydra has written a job's config as it is."""
    state = HydraConfig.get()
    files: list[Path] = []
    if state.output_subdir is not None:
        files += (Path(state.runtime.output_dir) / state.output_subdir).glob("*")
    if state.mode == RunMode.MULTIRUN:
        files += Path(state.sweep.dir).glob(SWEEP_CONFIG)
    return files


def run(cfg: DictConfig) -> float:
    """Check the composed config, then train; return the final eval/accuracy (NaN of a dry run).

    Raises:
        ConfigError: every problem of config and data, before any worker is started.
    """
    state = HydraConfig.get()
    overrides = _task_overrides()
    provenance = provenance_of(
        overrides, recipe_files(state.runtime.choices, state.runtime.config_sources)
    )
    in_sweep = state.mode == RunMode.MULTIRUN
    setup = SetupTimes(time.time() if in_sweep else program_start())
    if not cfg.run.dry:  # first of all: what does not fit breaks the imports of the other checks
        on_cpu = cfg.hardware.accelerator == Accelerator.cpu
        check_installation(Accelerator.cpu if on_cpu else Accelerator.gpu)
    machine = look()
    # A sweep over the cause of an idle key is no mistake: there it is only a warning.
    result = examined(cfg, machine, Provenance() if in_sweep else provenance)
    key = "hydra.sweep.dir" if in_sweep else "hydra.run.dir"
    if problem := auto_problem(result.config, state.overrides.hydra, key):
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
        table = plan(config, shape, machine, reward_shape)
        (console if console.is_terminal else Console(width=160)).print(table)
        return math.nan
    model_folder(config.model)  # a download, if any, is made once and not by every worker
    # Workers may start elsewhere, and checkpoints be resumed from there.
    config.model.path = absolute_path(config.model.path)
    if config.reward_model is not None:
        resolve_model(config.reward_model.model.path)
        config.reward_model.model.path = absolute_path(config.reward_model.model.path)
    if problems := [*stored_weight_problems(result, on_hub=True)]:
        raise ConfigError(*problems)
    from hybridrl.doctor.preflight import preflight  # heavy, and needed only now

    prepared = Prepared(result, machine, setup, partial(preflight, result, machine, overrides))
    prepared.is_on_course = config.resume == AUTO
    return train_with_restarts(prepared, Path(state.runtime.output_dir))


def _composed(line: CommandLine) -> Precomposed | None:
    """What Hydra will compose, with `hardware` chosen in `line` where its overrides name none.

    None where the user named another primary config, or nothing is composed.

    Raises:
        ConfigError: some overrides cannot be used; the rest of the config is checked in the same
            report.
    """
    if line.has_own_primary or not line.composes:
        return None
    found = composed(line, look)
    if found.problems:
        raise ConfigError(*found.problems, *_further_problems(line, found))
    return found


def _further_problems(line: CommandLine, found: Precomposed) -> list[str]:
    """Those of config and data, as far as they were composed; of a sweep each job finds its own."""
    if found.cfg is None or line.args.multirun:
        return []
    guard_logging(config_secrets(found.cfg))
    try:
        result = examined(found.cfg, look(), provenance_of(found.overrides, []))
    except ConfigError as error:
        return error.problems
    look_at_data(result)
    return result.report.problems


def _problems_around(
    error: BaseException, line: CommandLine, found: Precomposed | None
) -> list[str]:
    """What keeps Hydra from a run or a job, and what else is wrong.

    Args:
        error: Hydra's.
        line: the command line.
        found: what was composed of it.
    """
    further = _further_problems(line, found) if found is not None else []
    if isinstance(error, OSError | UnicodeEncodeError) or "null byte" in str(error):
        key = "hydra.sweep.dir" if line.args.multirun else "hydra.run.dir"
        folder = (
            f"{key}: the directory cannot be made or written to: {reason_of(error)}.\n"
            f"Set {key} to one that can."
        )
        return [folder, *further]
    # A value that cannot be resolved stands in the directory's name, too.
    return further or [problem_of(error)]


def _result(status: str, metric: float, seconds: float, error: str) -> JobResult:
    state = HydraConfig.get()
    return JobResult(
        job=int(state.job.num),
        overrides=[argument_without_secret(override) for override in _task_overrides()],
        status=status,
        metric=finite(metric),
        seconds=seconds,
        directory=state.runtime.output_dir,
        error=error.splitlines()[0] if error else "",
    )


if __name__ == "__main__":
    main()
