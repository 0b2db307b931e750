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
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import cast

import hydra
import psutil
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from hybridrl.app.before_start import (
    DRY,
    before_start,
    compose_line,
    examine,
    problems_around,
)
from hybridrl.app.checked import Checked, Prepared
from hybridrl.app.compose import conf_dir, make_paths_absolute, stored_weight_problems
from hybridrl.app.folders import HYDRA, Claim, kept_unless_begun, whole_config
from hybridrl.app.launch import train_with_restarts
from hybridrl.app.process import (
    EXIT_CONFIG,
    EXIT_FAILED,
    exit_codes,
    set_up_process,
    show_problems,
)
from hybridrl.app.runs import RESULT_FILE, keeps_result, run_at
from hybridrl.app.sweep import (
    NOT_BEGUN_FILE,
    SWEEP_CONFIG,
    JobResult,
    read_results,
    show_results,
)
from hybridrl.checkpoint.files import checkpoints_folder, step_name, steps_in
from hybridrl.config.checks.checkpoint import AUTO
from hybridrl.config.checks.frozen_models import named_models
from hybridrl.config.command.command_line import CONFIG_NAME, CommandLine, parse_argv
from hybridrl.config.command.input_errors import INPUT_ERRORS, problem_of
from hybridrl.config.command.overrides import Precomposed, run_composed
from hybridrl.config.command.secrets import (
    argument_without_secret,
    config_secrets,
    hide_in_files,
    without_secrets,
)
from hybridrl.config.errors import ConfigError
from hybridrl.config.load import is_on
from hybridrl.config.user_code.classes import callback_class, locate
from hybridrl.controller.calls import SetupTimes
from hybridrl.controller.errors import WorkerError
from hybridrl.controller.output import guard_logging, guard_standard_output
from hybridrl.controller.signals import Interrupted, preemption_behind
from hybridrl.models.resolve import model_folder, plain_folder, resolve_model
from hybridrl.plan.dry_run import dry_run
from hybridrl.report.page import write_at_end
from hybridrl.trainer.errors import RunStopped

log = logging.getLogger(__name__)

REPORT = "tracking.report"


def main() -> None:
    """Run the command line; exits by SystemExit unless all goes well."""
    guard_standard_output()
    # Hydra raises its errors instead of printing tracebacks.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    with exit_codes():
        set_up_process()
        line = parse_argv(sys.argv[1:])
        if line.problems and not line.composes:
            raise ConfigError(*line.problems)
        composition = compose_line(line) if line.composes else None
        claimed, checked = None, None
        if composition is not None and line.starts:
            started = before_start(line, composition, dry_run)
            if started is None:
                return
            claimed, checked = started
        start = time.time()
        try:
            with nullcontext() if claimed is None else kept_unless_begun(claimed.folder):
                _call_hydra(line, checked, composition)
        except INPUT_ERRORS as error:
            # After the jobs it is the sweeper's, such as Optuna's if none has an accuracy.
            if not (claimed and line.sweeps and read_results(claimed.folder, start)):
                raise ConfigError(*problems_around(error, line, composition)) from error
            sys.stderr.write(f"{problem_of(error)}\n")
        except SystemExit as end:
            if end.code == EXIT_CONFIG and claimed is not None:
                claimed.release(HYDRA, "main.log")
            raise
        except KeyboardInterrupt:
            _end_sweep(line, composition, claimed, start)
            raise
        if _end_sweep(line, composition, claimed, start):
            sys.exit(EXIT_FAILED)


def _call_hydra(line: CommandLine, checked: Checked | None, run: Precomposed | None) -> None:
    """Run `job` through Hydra, which composes for sweeps, to show a config, to debug itself."""

    def task(cfg: DictConfig) -> float | None:
        return job(cfg, checked)

    sys.argv = [sys.argv[0], *line.overrides, *line.options]
    if checked is not None and run is not None:
        cfg = whole_config(run)
        if not cfg.hydra.verbose:
            run_composed(cfg, conf_dir(), task)
            return
    hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=CONFIG_NAME)(task)()


def _end_sweep(
    line: CommandLine, composition: Precomposed | None, claimed: Claim | None, start: float
) -> bool:
    """Print a sweep's results; return True if a job has failed. Of dry runs no folder is left."""
    if claimed is None or not line.sweeps:
        return False
    assert composition is not None and composition.cfg is not None
    results = read_results(claimed.folder, start)
    is_dry = bool(claimed.made and results) and all(one.status == "dry" for one in results)
    show_results(None if is_dry else claimed.folder, results)
    if is_dry:
        claimed.release(*os.listdir(claimed.folder))
    elif is_on(composition.cfg, REPORT):
        write_at_end(claimed.folder)
    return any(result.status == "failed" for result in results)


def job(cfg: DictConfig, checked: Checked | None) -> float | None:
    """Run Hydra's task: one run, or one job of a sweep, whose failure is a result.

    Returns the final eval/accuracy; None without one, which Optuna takes for a failed trial.
    """
    start = time.time()
    folder = Path(HydraConfig.get().runtime.output_dir)
    earlier = run_at(folder)
    secrets = config_secrets(cfg)
    hide_in_files(_written_by_hydra(), secrets)
    guard_logging(secrets)

    def end(status: str, metric: float | None = None, error: str = "") -> None:
        # A start that did not begin leaves the result of the run that is there.
        is_other = status != "ok" and keeps_result(folder, earlier)
        result = _result(status, metric, without_secrets(error, secrets), time.time() - start)
        if _in_sweep() or not is_other:
            result.write(NOT_BEGUN_FILE if is_other else RESULT_FILE)
        if is_on(cfg, REPORT):
            write_at_end(folder)

    try:
        metric = run(cfg, checked)
    except ConfigError as error:
        show_problems(error)
        error_text, code = "; ".join(error.texts), EXIT_CONFIG
    except (WorkerError, RunStopped) as error:  # complete message
        log.error("%s", error)
        error_text, code = str(error), EXIT_FAILED
    # Outermost frame: after any error, user code that exits included, the next job must run.
    except (Exception, SystemExit) as error:
        log.exception("The run failed")
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        error_text, code = f"{type(error).__name__}: {error}", EXIT_FAILED
    except KeyboardInterrupt as error:  # also Interrupted, which Ray may reduce to it
        stopped = preemption_behind(error) or error
        if isinstance(stopped, Interrupted) and not stopped.how_to_resume:
            stopped.how_to_resume = _how_to_resume(folder)
        end("stopped", error=str(stopped))
        raise
    else:
        known = metric if math.isfinite(metric) else None
        end("dry" if is_on(cfg, DRY) else "ok", known)
        return known
    # Nothing is left of a run that was refused before it began.
    if _in_sweep() or code == EXIT_FAILED or run_at(folder) != earlier:
        end("failed", error=error_text)
    if not _in_sweep():
        sys.exit(code)
    return None


def _how_to_resume(run_dir: Path) -> str:
    """Name the newest checkpoint of a stopped run, for its message."""
    if steps := steps_in(checkpoints_folder(run_dir)):
        return f"; resume from {checkpoints_folder(run_dir) / step_name(steps[-1])}"
    return "; there is no checkpoint to resume from"


def _result(status: str, metric: float | None, error: str, seconds: float) -> JobResult:
    """Return how a run or a job ended, for the table of its sweep and for `hybridrl runs`."""
    state = HydraConfig.get()
    return JobResult(
        job=int(state.job.num) if _in_sweep() else 0,
        overrides=[argument_without_secret(override) for override in _task_overrides()],
        status=status,
        metric=metric,
        seconds=seconds,
        directory=state.runtime.output_dir,
        error=error.splitlines()[0] if error else "",
    )


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


def run(cfg: DictConfig, checked: Checked | None) -> float:
    """Check the composed config, unless it is `checked`, and train; return the final eval/accuracy.

    That is NaN of a dry run. ConfigError has every problem of config and data, before any worker
    is started.
    """
    in_sweep, state = _in_sweep(), cast(DictConfig, HydraConfig.get())
    setup = SetupTimes(time.time() if in_sweep else psutil.Process().create_time())
    if checked is None:
        checked = examine(Precomposed([], cfg, _task_overrides(), state), in_sweep=in_sweep)
    folder = Path(state.runtime.output_dir)
    if (prepared := prepare(checked, setup, folder)) is None:
        return math.nan
    return train_with_restarts(prepared, folder).accuracy


def prepare(checked: Checked, setup: SetupTimes, folder: Path) -> Prepared | None:
    """Check the models of a checked run; print the plan and return None for a dry run.

    `setup` has the times of the start so far; `folder` is the run's.

    Raises:
        ConfigError: every problem of config and data.
    """
    result, machine, config = checked.result, checked.machine, checked.result.config
    if result.report.problems:
        raise ConfigError(*result.report.problems)
    if config.run.dry:
        dry_run(checked, folder)
        return None
    model_folder(config.model)  # downloads once, not in every worker
    for model in named_models(config):
        (resolve_model if model.has_weights else plain_folder)(model.path)
    make_paths_absolute(config)
    if problems := [*stored_weight_problems(result, on_hub=True)]:
        raise ConfigError(*problems)
    from hybridrl.doctor.main import preflight  # heavy

    prepared = Prepared(checked, setup, partial(preflight, result, machine, checked.overrides))
    prepared.owns_checkpoints = config.resume == AUTO
    health = "hybridrl.health.observer.HealthChecks"  # imports torch
    prepared.observers = [lambda start: locate("health", health)(start)]
    prepared.callbacks = [callback_class(path)() for path in config.trainer.callbacks]
    return prepared


if __name__ == "__main__":
    main()
