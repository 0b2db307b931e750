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
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import hydra
import psutil
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from hybridrl.app.before_start import (
    before_start,
    compose_line,
    examine,
    problems_around,
    show_plan,
)
from hybridrl.app.compose import (
    conf_dir,
    stored_weight_problems,
)
from hybridrl.app.launch import Prepared, train_with_restarts
from hybridrl.app.process import (
    EXIT_CONFIG,
    EXIT_FAILED,
    exit_codes,
    set_up_process,
    show_problems,
)
from hybridrl.app.sweep import SWEEP_CONFIG, JobResult, read_results, show_results
from hybridrl.config.checks.checkpoint import AUTO
from hybridrl.config.command.command_line import (
    CONFIG_NAME,
    parse_argv,
)
from hybridrl.config.command.input_errors import INPUT_ERRORS, problem_of
from hybridrl.config.command.secrets import (
    argument_without_secret,
    config_secrets,
    hide_in_files,
    without_secrets,
)
from hybridrl.config.errors import ConfigError
from hybridrl.config.user_code.classes import callback_class
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
        found = compose_line(line)
        claimed = None
        if found is not None and line.starts:
            claimed = before_start(line, found)
            if claimed is None:
                return
        sys.argv = [sys.argv[0], *line.overrides, *line.options]
        command = hydra.main(
            version_base="1.3", config_path=str(conf_dir()), config_name=CONFIG_NAME
        )(job)
        start = time.time()
        try:
            command()
        except INPUT_ERRORS as error:
            results = read_results(claimed.folder, start) if claimed and line.sweeps else []
            if not results:
                raise ConfigError(*problems_around(error, line, found)) from error
            # Of the sweeper after the jobs, such as Optuna's if none has an accuracy.
            sys.stderr.write(f"{problem_of(error)}\n")
        except SystemExit as end:
            if end.code == EXIT_CONFIG and claimed is not None:
                claimed.release(".hydra", "main.log")
            raise
        if claimed is not None and line.sweeps:
            results = read_results(claimed.folder, start)
            show_results(claimed.folder, results)
            if any(result.status == "failed" for result in results):
                sys.exit(EXIT_FAILED)


def job(cfg: DictConfig) -> float | None:
    """Run Hydra's task: one run, or one job of a sweep, whose failure is a result.

    Returns the final eval/accuracy; None without one, which Optuna takes for a failed trial.
    """
    start = time.time()
    secrets = config_secrets(cfg)
    hide_in_files(_written_by_hydra(), secrets)
    guard_logging(secrets)

    def end(status: str, metric: float | None = None, error: str = "") -> None:
        error = without_secrets(error, secrets)
        _write_result(status, metric, error, seconds=time.time() - start)

    try:
        metric = run(cfg)
    except ConfigError as error:
        show_problems(error)
        error_text, code = "; ".join(error.problems), EXIT_CONFIG
    except (WorkerError, RunStopped) as error:  # complete message
        log.error("%s", error)
        error_text, code = str(error), EXIT_FAILED
    # Outermost frame: after any error, user code that exits included, the next job must run.
    except (Exception, SystemExit) as error:
        log.exception("The run failed")
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        error_text, code = f"{type(error).__name__}: {error}", EXIT_FAILED
    except KeyboardInterrupt as error:  # also Interrupted, which Ray may reduce to it
        end("stopped", error=str(error))
        raise
    else:
        known = metric if math.isfinite(metric) else None
        end("dry" if cfg.run.dry else "ok", known)
        return known
    if _in_sweep() or code == EXIT_FAILED:  # nothing is left of a refused run
        end("failed", error=error_text)
    if not _in_sweep():
        sys.exit(code)
    return None


def _write_result(status: str, metric: float | None, error: str, *, seconds: float) -> None:
    """Write how a run or a job ended, for the table of its sweep and for `hybridrl runs`."""
    state = HydraConfig.get()
    JobResult(
        job=int(state.job.num) if _in_sweep() else 0,
        overrides=[argument_without_secret(override) for override in _task_overrides()],
        status=status,
        metric=metric,
        seconds=seconds,
        directory=state.runtime.output_dir,
        error=error.splitlines()[0] if error else "",
    ).write()


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
    in_sweep = _in_sweep()
    setup = SetupTimes(time.time() if in_sweep else psutil.Process().create_time())
    prepared = prepare(cfg, HydraConfig.get(), _task_overrides(), setup, in_sweep=in_sweep)
    if prepared is None:
        return math.nan
    return train_with_restarts(prepared, Path(HydraConfig.get().runtime.output_dir)).accuracy


def prepare(
    cfg: DictConfig,
    state: Any,
    overrides: Sequence[str],
    setup: SetupTimes,
    *,
    in_sweep: bool = False,
) -> Prepared | None:
    """Check a composed config and its data; print the plan and return None for a dry run.

    Args:
        cfg: as composed by Hydra, without its own section.
        state: the section `hydra`.
        overrides: as typed, without those of Hydra.
        setup: times of the start so far.
        in_sweep: true for a job of a sweep.

    Raises:
        ConfigError: every problem of config and data.
    """
    checked = examine(cfg, overrides, state.runtime, in_sweep=in_sweep)
    result, machine, config = checked.result, checked.machine, checked.result.config
    if result.report.problems:
        raise ConfigError(*result.report.problems)
    if config.run.dry:
        show_plan(checked)
        return None
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
    prepared.callbacks = [callback_class(path)() for path in config.trainer.callbacks]
    return prepared


if __name__ == "__main__":
    main()
