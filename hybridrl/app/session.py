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
from hybridrl.app.observers import ObserverParts
from hybridrl.app.reference_answers import show_reference_rewards
from hybridrl.app.runs import RESULT_FILE
from hybridrl.checkpoint import verification
from hybridrl.checkpoint.verification import Verify
from hybridrl.config.checks.reward_model import NO_REWARD
from hybridrl.config.choices import Accelerator
from hybridrl.config.estimators import is_supervised
from hybridrl.config.load import Examined
from hybridrl.config.planner.flops import peak_per_rank
from hybridrl.config.planner.machine import Machine, torch_threads
from hybridrl.config.planner.model_shape import ModelShape
from hybridrl.config.planner.world import training_ranks
from hybridrl.config.schema import RunConfig
from hybridrl.controller.errors import WorkerError
from hybridrl.controller.signals import Preemption
from hybridrl.controller.worker_group import Pool, Workers, build_workers, role_configs
from hybridrl.data.sources.prompt_source import PromptSource, prompt_source
from hybridrl.data.sources.prompts import PromptSets
from hybridrl.data.sources.tokenizer import decoder, load_tokenizer
from hybridrl.trainer.build import LoopParts, build_loop
from hybridrl.trainer.checkpointing.base_models import Fingerprints, base_models
from hybridrl.trainer.checkpointing.checkpointer import Checkpointer
from hybridrl.trainer.checkpointing.own_code import own_code
from hybridrl.trainer.checkpointing.resume import Resume, described, find_resume
from hybridrl.trainer.evaluate import Evaluator
from hybridrl.trainer.factory import generator_for, open_environment, open_rewards, open_rules
from hybridrl.trainer.health.health import Health
from hybridrl.trainer.health.measures import marked_tokens
from hybridrl.trainer.record import RunHandle
from hybridrl.trainer.rewarding import FunctionRewards, RewardSource
from hybridrl.trainer.step import TrainingLoop
from hybridrl.trainer.timing.throughput import Throughput
from hybridrl.trainer.tracking.console import RunConsole
from hybridrl.trainer.tracking.header import header_lines
from hybridrl.trainer.tracking.provenance import write_manifest
from hybridrl.trainer.tracking.records import RecordBuilder
from hybridrl.trainer.tracking.summary import COLUMNS, SUPERVISED_COLUMNS
from hybridrl.trainer.tracking.tracker import Tracker

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
    (result, machine, _, command, _), setup = prepared.checked, prepared.setup
    config, prompts, resume = result.config, inputs.prompts, inputs.resume
    shape = result.shape
    assert shape is not None
    run_dir.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        if not os.environ.get("OMP_NUM_THREADS"):  # else torch uses the user's number
            on_gpu = config.hardware.accelerator is Accelerator.gpu
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(torch_threads(on_gpu=on_gpu, processes=1))
        columns = SUPERVISED_COLUMNS if is_supervised(config) else COLUMNS
        console = stack.enter_context(RunConsole(config.trainer.total_steps, columns=columns))
        _route_logging(console, stack)
        if resume is not None:
            resume.quarantine(run_dir)
        started = datetime.now(UTC)
        try:
            found = None if resume is None else resume.found
            facts = {"hardware": machine, "data": prompts.data_sets}
            facts |= {"models": inputs.models, "code": inputs.code}
            (run_dir / RESULT_FILE).unlink(missing_ok=True)  # of an earlier start
            write_manifest(run_dir, config, facts, started=started, command=command, found=found)
            link_latest(run_dir)
        except OSError as error:  # the run does not need them
            log.warning("the manifest or outputs/latest could not be written: %s", error)
        _show_header(result, run_dir, machine, prompts, resume, console)
        tokenizer = load_tokenizer(config.model)
        decode = decoder(tokenizer)
        environment = open_environment(config, stack)
        rewards = open_rewards(config, environment, decode, stack)
        _show_references(config, prompts, rewards, console)
        evaluator = _evaluator(config, prompts, rewards, stack)
        tracker = _tracker(config, run_dir, resume, stack)
        health, measures = Health(config, tracker.rows), dict(prompts.measures)
        for warning in health.examine(measures, prompts.details):
            console.warn(warning)
        setup.mark("driver")
        workers = Workers(pool, **build_workers(config, role_configs(config), pool))
        stack.enter_context(pool)  # ends before what was opened above
        setup.mark("workers", pool.start_times.seconds)
        grace_s = config.checkpoint.on_sigterm if config.checkpoint.every_steps else 0.0
        preemption = stack.enter_context(Preemption(grace_s))
        decode_all = decoder(tokenizer, special=True)
        read = {**inputs.models, **inputs.code}
        checkpoints = Checkpointer(config, run_dir, workers.saver, tracker.sync, console.warn, read)
        row = {} if resume is None or not resume.rows else resume.rows[-1]
        run = RunHandle(config, RecordBuilder(config, decode, decode_all), row)

        observers = ObserverParts(
            config=config,
            run_dir=run_dir,
            run=run,
            console=console,
            tracker=tracker,
            throughput=_throughput(config, shape, machine),
            health=health,
            checkpoints=checkpoints,
            callbacks=prepared.callbacks,
            first=lambda: {**setup.metrics(), **(measures if resume is None else {})},
            decode=decode_all,
            marked=marked_tokens(config.model, tokenizer),
        )
        parts = LoopParts(
            config=config,
            run_dir=run_dir,
            shape=shape,
            workers=workers,
            prompts=inputs.source,
            generator=generator_for(config, environment, workers.rollout, prompts, decode, stack),
            rewards=rewards,
            evaluator=evaluator,
            checkpoints=checkpoints,
            preemption=preemption,
            run=run,
            phase=console.phase,
            warn=console.warn,
            resume=resume,
        )
        loop = build_loop(parts, observers.open)
        setup.mark("driver")
        hosts = [("", host.describe()) for host in workers.pool.hosts]
        console.header("workers", [*hosts, ("setup", str(setup))])
        stack.push(partial(_finish_checkpoint, checkpoints))
        yield loop


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
        top_p=config.rollout.top_p,
        greedy=config.eval.greedy,
        top_k=config.eval.top_k,
        samples=config.eval.samples,
    )


def _tracker(config: RunConfig, run_dir: Path, resume: Resume | None, stack: ExitStack) -> Tracker:
    """Return the tracker; its metrics are sent at the end, also after a failure."""
    tracker = Tracker(run_dir, config, [] if resume is None else resume.rows)
    stack.push(lambda kind, *_: tracker.close(timeout_s=TRACKERS_S if kind is None else HURRY_S))
    return tracker


def _throughput(config: RunConfig, shape: ModelShape, machine: Machine) -> Throughput:
    """Return the throughput metrics; without MFU if GPUs are of several or unknown kinds."""
    peak = peak_per_rank(machine.gpus, config.fsdp.param_dtype)
    return Throughput(
        shape=shape,
        epochs=config.actor.epochs,
        peak=None if peak is None else peak * training_ranks(config),
        trains_all=config.lora is None,
    )


def _show_header(
    result: Examined,
    run_dir: Path,
    machine: Machine,
    prompts: PromptSets,
    resume: Resume | None,
    console: RunConsole,
) -> None:
    config, shape, reward = result.config, result.shape, result.reward_shape
    assert shape is not None
    of_reward = 0 if reward is None else reward.backbone_parameters + reward.hidden
    lora, about = config.lora, machine.describe()
    adapters = 0 if lora is None else shape.adapter_parameters(lora.rank, lora.target_modules)
    counts = shape.parameters, of_reward, shape.layers * adapters
    lines = header_lines(config, run_dir, about, prompts, *counts)
    console.header(config.run.name, [*lines, *described(resume, config, run_dir)])


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
