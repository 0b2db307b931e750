"""Training from Python: a whole run by `train`, or step by step by `Trainer`.

Checks and session are those of the command line. Errors are raised, and nothing of the process is
changed for good but the environment's variables of caches and sys.path.
"""

import logging
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybridrl.app.before_start import compose_line, examine
from hybridrl.app.checked import Prepared
from hybridrl.app.folders import Claim, claim, directory, template, whole_config
from hybridrl.app.launch import running, train_with_restarts
from hybridrl.app.process import set_up_process
from hybridrl.app.runs import keeps_result, progress, run_at
from hybridrl.app.sweep import JobResult
from hybridrl.config.checks.checkpoint import auto_problem
from hybridrl.config.command.command_line import RUN_DIR, parse_argv
from hybridrl.config.command.input_errors import problem_of
from hybridrl.config.command.overrides import Precomposed, quoted
from hybridrl.config.command.secrets import config_secrets
from hybridrl.config.errors import ConfigError
from hybridrl.config.schema import RunConfig
from hybridrl.config.schema_keys import without_shared
from hybridrl.controller.calls import SetupTimes
from hybridrl.controller.output import lossy_text
from hybridrl.controller.signals import preemption_behind
from hybridrl.main import prepare
from hybridrl.report.page import write_at_end

if TYPE_CHECKING:
    from hybridrl.data.batch import RolloutBatch
    from hybridrl.trainer.callbacks import Callback
    from hybridrl.trainer.record import RolloutRecord, Row, RunResult
    from hybridrl.trainer.step import TrainingLoop

# Overrides as on the command line, or a whole config: composed by Hydra, or of a manifest.json.
Config = Sequence[str] | Mapping[str, Any] | DictConfig | RunConfig
CONFIG_DIR = "--config-dir"
LOG = "main.log"


def train(
    config: Config, callbacks: "Sequence[Callback]" = (), *, folder: str | Path | None = None
) -> "RunResult":
    """Train as `python -m hybridrl.main` does with the same overrides.

    Args:
        config: overrides (["+recipe=gsm8k_ppo", "trainer.total_steps=2"]), or a whole config.
        callbacks: called before those of trainer.callbacks.
        folder: directory of the run, as hydra.run.dir.

    Raises:
        ConfigError: every problem of config and data.
        RunStopped: too many updates were not finite, all rewards or a callback failed.
        WorkerError: workers failed.
    """
    run = checked_run(config, callbacks, folder)
    from hybridrl.trainer.record import RunResult

    if run.prepared is None:
        return RunResult(math.nan, run.folder, 0, {})
    with _logging(run), _recorded(run):
        return train_with_restarts(run.prepared, run.folder)


class Trainer:
    """A run, step by step. It checks the config at once, and starts Ray and workers when needed::

        with hybridrl.Trainer(["+recipe=gsm8k_ppo"]) as trainer:
            metrics = trainer.step()

    Without `with`, such as over the cells of a notebook, call `close` at the end. After an error or
    Ctrl-C in a method everything is closed: the workers may be in the middle of a call.

    Attributes:
        folder: directory of the run.
        config: of the run, resolved.

    Raises:
        ConfigError: every problem of config and data.
    """

    def __init__(
        self,
        config: Config,
        callbacks: "Sequence[Callback]" = (),
        *,
        folder: str | Path | None = None,
    ) -> None:
        self._run = checked_run(config, callbacks, folder)
        if self._run.prepared is None:
            raise ConfigError("run.dry = true: a dry run has no steps.\nRemove run.dry.")
        self.folder = self._run.folder
        self.config: RunConfig = self._run.prepared.checked.result.config
        self._stack = ExitStack()
        self._loop: TrainingLoop | None = None
        self._is_closed = False

    @property
    def loop(self) -> "TrainingLoop":
        """The loop that does the steps, with its parts; starts Ray and workers if needed."""
        if self._is_closed:
            raise RuntimeError("the trainer is closed; make a new one")
        if self._loop is None:
            assert self._run.prepared is not None
            with ExitStack() as stack:
                stack.enter_context(_logging(self._run))
                stack.enter_context(_recorded(self._run))
                loop = stack.enter_context(running(self._run.prepared, self.folder))
                loop.begin(evaluates=False)
                self._loop, self._stack = loop, stack.pop_all()
        return self._loop

    def step(self) -> "Row":
        """Train one step; return its metrics, a row of metrics.jsonl.

        Raises:
            ConfigError: trainer.total_steps are done.
            RunStopped, WorkerError: as `train`.
        """
        with self._closing_after_errors() as loop:
            if loop.saves.step < self.config.trainer.total_steps:
                return loop.step()
        total = self.config.trainer.total_steps
        raise ConfigError(
            f"trainer.total_steps = {total}: all steps are done.\nSet more steps at the start."
        )

    def evaluate(self) -> "Row":
        """Measure the held-out accuracy of the present weights; return the metrics eval/..."""
        with self._closing_after_errors() as loop:
            step = loop.saves.step
            is_end = step in (0, self.config.trainer.total_steps) or loop.run.is_stopped
            metrics = loop.evaluations.evaluate(step, is_end=is_end)
        return {name: value for name, value in metrics.items() if name.startswith("eval/")}

    def fit(self) -> "RunResult":
        """Train the remaining steps, save the model, and print the summary."""
        with self._closing_after_errors() as loop:
            return loop.fit()

    @property
    def batch(self) -> "RolloutBatch | None":
        """Responses of the last step, with scores, log-probs, advantages and returns."""
        return self.loop.run.batch

    @property
    def samples(self) -> "list[RolloutRecord]":
        """Prompts, texts and scores of `batch`, in its order."""
        return self.loop.run.samples

    def close(self) -> None:
        """Wait until the last checkpoint is written, then end the workers and Ray."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        _ = self.loop  # starts
        return self

    def __exit__(self, *error: Any) -> None:
        self._is_closed = True
        self._stack.__exit__(*error)

    @contextmanager
    def _closing_after_errors(self) -> "Iterator[TrainingLoop]":
        try:
            yield self.loop
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise


class _Run(NamedTuple):
    """A checked run; `prepared` is None for a dry one."""

    prepared: Prepared | None
    folder: Path
    secrets: set[str]


def checked_run(config: Config, callbacks: "Sequence[Callback]", folder: str | Path | None) -> _Run:
    """Compose and check a run; nothing is written."""
    set_up_process()
    setup = SetupTimes(time.time())
    config = [config] if isinstance(config, str) else config
    at = [] if folder is None else [f"hydra.run.dir={quoted(str(folder))}"]
    if isinstance(config, RunConfig | Mapping | DictConfig):
        composition = _composed(["hardware=cpu", *at])._replace(cfg=_whole(config), overrides=[])
    else:
        composition = _composed([*config, *at])
    assert composition.cfg is not None and composition.hydra is not None
    where = template(composition.hydra, RUN_DIR)
    if problem := auto_problem(composition.cfg.resume, RUN_DIR, where):
        raise ConfigError(problem)
    try:
        own = directory(whole_config(composition), RUN_DIR)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{RUN_DIR}: {problem_of(error)}.") from error
    checked = examine(composition)
    if callbacks or not composition.overrides:  # a command has neither callbacks nor a whole config
        checked = checked._replace(command={})
    prepared = prepare(checked, setup, own)
    if prepared is not None:
        prepared.callbacks = [*callbacks, *prepared.callbacks]
    return _Run(prepared, own, config_secrets(composition.cfg))


def _composed(overrides: Sequence[str]) -> Precomposed:
    """Compose the config of overrides."""
    options = [text for text in overrides if text.startswith("-")]
    if wrong := [text for text in options if not text.startswith(f"{CONFIG_DIR}=")]:
        raise ConfigError(
            f"{wrong[0]}: expected overrides, such as +recipe=gsm8k_ppo, or {CONFIG_DIR}=...\n"
            f"Sweeps and other options are the command line's."
        )
    return compose_line(parse_argv(overrides), guards_output=False)


def _whole(config: Mapping[str, Any] | DictConfig | RunConfig) -> DictConfig:
    """Return a whole config as Hydra would compose it, with links of the roles."""
    if isinstance(config, RunConfig):
        config = asdict(config)
    tree: Any = OmegaConf.to_container(OmegaConf.create(config))  # type: ignore[arg-type]
    if not {"run", "hardware"} <= tree.keys():
        raise ConfigError(
            f"the config has only {', '.join(tree)}: expected a whole one, as of a manifest.json.\n"
            f"For single values give a list of overrides: ['+recipe=gsm8k_ppo', 'seed=2']."
        )
    return without_shared(tree)


@contextmanager
def _recorded(run: _Run) -> Iterator[None]:
    """Write how the run ends, for `hybridrl runs`, and its report; nothing if it has not begun."""
    assert run.prepared is not None
    start, status, error = time.time(), "failed", ""
    earlier = run_at(run.folder)
    try:
        yield
        status = "ok"
    except ConfigError:
        status = "" if run_at(run.folder) == earlier else "failed"
        raise
    except KeyboardInterrupt as stopped:  # also Interrupted
        status, error = "stopped", str(preemption_behind(stopped) or stopped)
        raise
    finally:
        if status:
            seconds, accuracy = time.time() - start, progress(run.folder).accuracy
            if status == "ok" or not keeps_result(run.folder, earlier):
                JobResult(0, [], status, accuracy, seconds, str(run.folder), error).write()
            if run.prepared.checked.result.config.tracking.report:
                write_at_end(run.folder)


@contextmanager
def _logging(run: _Run) -> Iterator[None]:
    """Log to <run>/main.log and, unless the caller has set up logging, to the console.

    A folder that was made for this is removed if the run is refused.
    """
    root, ours = logging.getLogger(), logging.getLogger("hybridrl")
    handlers: list[logging.Handler] = [] if root.handlers else [logging.StreamHandler()]
    claimed = Claim(run.folder, [])
    with suppress(OSError):  # reported when the directory is locked
        claimed = claim(run.folder, is_new=False)
        file = logging.FileHandler(run.folder / LOG)
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        file.setStream(lossy_text(file.baseFilename, run.secrets))
        handlers.append(file)
    before, level = list(root.handlers), ours.level
    root.handlers = [*before, *handlers]
    ours.setLevel(logging.INFO)
    try:
        yield
    except ConfigError:
        claimed.release(LOG)
        raise
    finally:
        root.handlers = before
        ours.setLevel(level)
        for handler in handlers:
            handler.close()
