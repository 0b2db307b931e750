"""Session of a training run: opens everything the loop needs, in order.

reward processes                 on the driver, at once
worker processes                 all roles on all ranks (controller/)
header, manifest                 description of the run
TrainingLoop.fit                 the loop
"""

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from hybridrl.app.checked import Prepared
from hybridrl.app.folders import link_latest
from hybridrl.app.observers import Callbacks, FirstMetrics, Start
from hybridrl.app.reference_answers import show_reference_rewards
from hybridrl.app.runs import RESULT_FILE
from hybridrl.checkpoint import verification
from hybridrl.checkpoint.verification import Verify
from hybridrl.config.checks.reward_model import NO_REWARD
from hybridrl.config.choices import Accelerator
from hybridrl.config.estimators import is_supervised
from hybridrl.config.planner.flops import peak_per_rank
from hybridrl.config.planner.machine import torch_threads
from hybridrl.config.planner.world import training_ranks
from hybridrl.config.schema import RunConfig
from hybridrl.controller.errors import WorkerError
from hybridrl.controller.signals import Preemption
from hybridrl.controller.worker_group import Pool, Workers, build_workers, role_configs
from hybridrl.data.sources.prompt_source import PromptSource, prompt_source
from hybridrl.data.sources.prompts import PromptSets
from hybridrl.data.sources.tokenizer import decoder, load_tokenizer
from hybridrl.models.fingerprints import Fingerprints, base_models
from hybridrl.trainer.build import LoopParts, build_loop
from hybridrl.trainer.checkpointing.checkpointer import Checkpointer
from hybridrl.trainer.checkpointing.own_code import own_code
from hybridrl.trainer.checkpointing.resume import Resume, described, find_resume
from hybridrl.trainer.evaluate import Evaluator
from hybridrl.trainer.factory import generator_for, open_environment, open_rewards, open_rules
from hybridrl.trainer.nonfinite import NonFiniteGuard
from hybridrl.trainer.record import Observer, Row, RunHandle
from hybridrl.trainer.rewarding import FunctionRewards, RewardSource
from hybridrl.trainer.step import TrainingLoop
from hybridrl.trainer.timing.engines import engine_place
from hybridrl.trainer.timing.phases import GraceCheck
from hybridrl.trainer.timing.throughput import Throughput
from hybridrl.trainer.tracking.console import RunConsole
from hybridrl.trainer.tracking.header import header_lines
from hybridrl.trainer.tracking.progress import Progress
from hybridrl.trainer.tracking.provenance import write_manifest
from hybridrl.trainer.tracking.records import RecordBuilder, Records
from hybridrl.trainer.tracking.summary import COLUMNS, SUPERVISED_COLUMNS
from hybridrl.trainer.tracking.tracker import Tracker
from hybridrl.trainer.updates import Updates

log = logging.getLogger(__name__)

# Seconds for trackers to send remaining metrics: after success, and after a failure.
TRACKERS_S, HURRY_S = 20.0, 3.0


class RunInputs(NamedTuple):
    """Prompts, their order in training, base models, own code and checkpoint.

    They are read before workers start.
    """

    prompts: PromptSets
    source: PromptSource
    models: Fingerprints
    code: Fingerprints
    resume: Resume | None


def read_inputs(
    config: RunConfig,
    run_dir: Path,
    prompts: PromptSets,
    verify: Verify = verification.verify,
) -> RunInputs:
    """Read the inputs of a run; writes nothing. ConfigError for a model or the checkpoint."""
    source = prompt_source(prompts, config.data, config.seed, config.rollout.max_in_flight)
    models, code = base_models(config), own_code(config)
    # Takes seconds for hundreds of thousands of prompts: not during the first checkpoint.
    known = source.fingerprint
    resume = find_resume(config, run_dir, {**models, **code}, known, verify)
    return RunInputs(prompts, source, models, code, resume)


@contextmanager
def open_trainer(
    prepared: Prepared, run_dir: Path, inputs: RunInputs, pool: Pool
) -> Iterator[TrainingLoop]:
    """Yield the trainer of a run with its workers in a new pool, which the caller closes."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        yield Session(prepared, run_dir, inputs, stack).open(pool)


class Session:
    """Parts of a run that are opened before its workers; `stack` ends them."""

    def __init__(
        self, prepared: Prepared, run_dir: Path, inputs: RunInputs, stack: ExitStack
    ) -> None:
        self.prepared, self.run_dir, self.inputs, self.stack = prepared, run_dir, inputs, stack
        self.checked = prepared.checked.result
        self.config = config = self.checked.config
        if not os.environ.get("OMP_NUM_THREADS"):  # else torch uses the user's number
            on_gpu = config.hardware.accelerator is Accelerator.gpu
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(torch_threads(on_gpu=on_gpu, processes=1))
        columns = SUPERVISED_COLUMNS if is_supervised(config) else COLUMNS
        self.console = stack.enter_context(RunConsole(config.trainer.total_steps, columns=columns))
        _route_logging(self.console, stack)
        self._describe()
        tokenizer = load_tokenizer(config.model)
        self.decode, self.decode_all = decoder(tokenizer), decoder(tokenizer, special=True)
        self.environment = open_environment(config, stack)
        self.rewards = open_rewards(config, self.environment, self.decode, stack)
        _show_references(config, inputs.prompts, self.rewards, self.console)
        self.evaluator = _evaluator(config, inputs.prompts, self.rewards, stack)
        self.tracker = _tracker(config, run_dir, inputs.resume, stack)
        rows, warn = self.tracker.rows, self.console.warn
        start = Start(config, run_dir, rows, inputs.prompts, tokenizer, warn)
        self.further = [opens(start) for opens in prepared.observers]
        prepared.setup.mark("driver")

    def open(self, pool: Pool) -> TrainingLoop:
        """Build the workers in a pool and return the trainer."""
        config, setup = self.config, self.prepared.setup
        resume, stack = self.inputs.resume, self.stack
        workers = Workers(pool, **build_workers(config, role_configs(config), pool))
        stack.enter_context(pool)  # ends before what was opened above
        setup.mark("workers", pool.start_times.seconds)
        grace_s = config.checkpoint.on_sigterm if config.checkpoint.every_steps else 0.0
        preemption = stack.enter_context(Preemption(grace_s))
        fingerprints = {**self.inputs.models, **self.inputs.code}
        sync, warn = self.tracker.sync, self.console.warn
        checkpoints = Checkpointer(config, self.run_dir, workers.saver, sync, warn, fingerprints)
        row = {} if resume is None or not resume.rows else resume.rows[-1]
        run = RunHandle(config, RecordBuilder(config, self.decode, self.decode_all), row)
        assert self.checked.shape is not None
        parts = LoopParts(
            config=config,
            run_dir=self.run_dir,
            shape=self.checked.shape,
            workers=workers,
            prompts=self.inputs.source,
            generator=generator_for(config, self.environment, workers.rollout, self.decode, stack),
            rewards=self.rewards,
            evaluator=self.evaluator,
            checkpoints=checkpoints,
            preemption=preemption,
            run=run,
            phase=self.console.phase,
            warn=warn,
            resume=resume,
        )
        loop = build_loop(parts, partial(self._observers, checkpoints, run))
        setup.mark("driver")
        hosts = [("", host.describe()) for host in pool.hosts]
        self.console.header("workers", [*hosts, ("setup", str(setup))])
        stack.push(partial(_finish_checkpoint, checkpoints))
        return loop

    def _observers(
        self, checkpoints: Checkpointer, run: RunHandle, updates: Updates, guard: NonFiniteGuard
    ) -> list[Observer]:
        """Return the observers; later ones see what earlier ones add."""
        config, console, tracker = self.config, self.console, self.tracker
        setup, decode_all = self.prepared.setup, self.decode_all
        measures: Row = {}
        if self.inputs.resume is None:
            measures |= self.inputs.prompts.measures
            for observer in self.further:
                measures |= observer.first
        records = Records(config, self.run_dir, run.records, updates, decode_all, console, tracker)
        for observer in self.further:
            observer.begin(updates.token_stats, partial(engine_place, updates.workers.rollout))
        return [
            FirstMetrics(lambda: {**setup.metrics(), **measures}),
            self._throughput(),
            records,
            *self.further,
            Progress(config, console, tracker, records.failures, lambda: checkpoints.failures),
            checkpoints,
            GraceCheck(config.checkpoint.on_sigterm, console.warn, lambda: checkpoints.write_s),
            guard,
            Callbacks(self.prepared.callbacks, run),
        ]

    def _throughput(self) -> Throughput:
        """Return the throughput metrics; without MFU if GPUs are of several or unknown kinds."""
        config, shape, machine = self.config, self.checked.shape, self.prepared.checked.machine
        assert shape is not None
        peak = peak_per_rank(machine.gpus, config.fsdp.param_dtype)
        whole = None if peak is None else peak * training_ranks(config)
        return Throughput(shape, config.actor.epochs, whole, trains_all=config.lora is None)

    def _describe(self) -> None:
        """Write the manifest, point outputs/latest to the run, and print the header."""
        config, run_dir, checked = self.config, self.run_dir, self.prepared.checked
        inputs, resume = self.inputs, self.inputs.resume
        if resume is not None:
            resume.quarantine(run_dir)
        facts = {"hardware": checked.machine, "data": inputs.prompts.data_sets}
        facts |= {"models": inputs.models, "code": inputs.code}
        checkpoint = None if resume is None else resume.checkpoint
        try:
            (run_dir / RESULT_FILE).unlink(missing_ok=True)  # of an earlier start
            write_manifest(
                run_dir,
                config,
                facts,
                started=datetime.now(UTC),
                command=checked.command,
                checkpoint=checkpoint,
            )
            link_latest(run_dir)
        except OSError as error:  # the run does not need them
            log.warning("the manifest or outputs/latest could not be written: %s", error)
        shape, frozen, lora = self.checked.shape, self.checked.frozen, config.lora
        assert shape is not None
        adapters = 0 if lora is None else shape.adapter_parameters(lora.rank, lora.target_modules)
        counts = shape.parameters, frozen, adapters
        about = checked.machine.describe()
        lines = header_lines(config, run_dir, about, inputs.prompts, *counts)
        self.console.header(config.run.name, [*lines, *described(resume, config, run_dir)])


def _finish_checkpoint(
    checkpoints: Checkpointer, kind: type[BaseException] | None, *_: object
) -> None:
    """Commit the checkpoint that is being written, also after an error, but of the workers."""
    if kind is None or (issubclass(kind, Exception) and not issubclass(kind, WorkerError)):
        checkpoints.finish()
    else:
        checkpoints.close()


def _evaluator(
    config: RunConfig, prompts: PromptSets, rewards: RewardSource, stack: ExitStack
) -> Evaluator:
    return Evaluator(
        prompts.held_out,
        rewards,
        open_rules(config, stack),
        temperature=config.rollout.temperature,
        top_p=config.eval_top_p,
        greedy=config.eval.greedy,
        top_k=config.eval.top_k,
        samples=config.eval.samples,
    )


def _tracker(config: RunConfig, run_dir: Path, resume: Resume | None, stack: ExitStack) -> Tracker:
    """Return the tracker; its metrics are sent at the end, also after a failure."""
    tracker = Tracker(run_dir, config, [] if resume is None else resume.rows)
    stack.push(lambda kind, *_: tracker.close(timeout_s=TRACKERS_S if kind is None else HURRY_S))
    return tracker


def _show_references(
    config: RunConfig, prompts: PromptSets, rewards: RewardSource, console: RunConsole
) -> None:
    """Print the rewards of reference answers; environments judge no finished texts."""
    if isinstance(rewards, FunctionRewards) and config.reward.function != NO_REWARD:
        show_reference_rewards(config, prompts.train, rewards, console)


def _route_logging(console: RunConsole, stack: ExitStack) -> None:
    """Route log lines above the console's live display during the run."""
    root = logging.getLogger()
    handler = console.logging_handler()
    before = list(root.handlers)
    files = [old for old in before if isinstance(old, logging.FileHandler)]
    root.handlers = [
        handler if isinstance(old, logging.StreamHandler) and old not in files else old
        for old in before
    ]
    stack.callback(setattr, root, "handlers", before)
