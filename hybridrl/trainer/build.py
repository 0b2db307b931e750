"""Assembly of the training loop from the parts of a run."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hybridrl.config.estimators import is_supervised, trains_policy, trains_reward_model
from hybridrl.config.planner.shape import ModelShape
from hybridrl.config.schema import RunConfig
from hybridrl.controller.signals import Preemption
from hybridrl.controller.worker_group import Workers
from hybridrl.data.lengths import ResponseLengths
from hybridrl.data.schedule import update_sizes
from hybridrl.data.sources.prompt_source import PromptSource
from hybridrl.trainer.advantage import Advantages, KLControl
from hybridrl.trainer.checkpointing.checkpointer import Checkpointer
from hybridrl.trainer.checkpointing.resume import Resume
from hybridrl.trainer.checkpointing.saves import Saves
from hybridrl.trainer.episodes.base import Generator
from hybridrl.trainer.evaluate import Evaluations, Evaluator
from hybridrl.trainer.factory import open_source
from hybridrl.trainer.nonfinite import NonFiniteGuard
from hybridrl.trainer.record import Observer, Observers, RunHandle
from hybridrl.trainer.rewarding import RewardSource
from hybridrl.trainer.sampling.hybrid_engine import engine_of
from hybridrl.trainer.sampling.rollouts import Rollouts
from hybridrl.trainer.sampling.source import Generation, SourceParts
from hybridrl.trainer.sampling.start_check import PROMPTS, StartCheck
from hybridrl.trainer.scoring import Scoring
from hybridrl.trainer.sft import SFT, GivenAnswers, supervised
from hybridrl.trainer.state import TrainState
from hybridrl.trainer.step import PPO, TrainingLoop
from hybridrl.trainer.timing.engines import engine_place
from hybridrl.trainer.timing.phases import Phases, StepProfiler
from hybridrl.trainer.updates import Updates


@dataclass(frozen=True)
class LoopParts:
    """Parts of a run that the training loop is made of.

    Attributes:
        generator: samples on the engines.
        run: what user code sees.
        phase, warn: show the present phase, and a warning.
    """

    config: RunConfig
    run_dir: Path
    shape: ModelShape
    workers: Workers
    prompts: PromptSource
    generator: Generator
    rewards: RewardSource
    evaluator: Evaluator
    checkpoints: Checkpointer
    preemption: Preemption
    run: RunHandle
    phase: Callable[[str], None]
    warn: Callable[[str], None]
    resume: Resume | None


def build_loop(
    parts: LoopParts, observers: Callable[[Updates, NonFiniteGuard], list[Observer]]
) -> TrainingLoop:
    """Return the training loop of a run.

    `observers` returns them, given what computes log-probs after an update and the guard.
    """
    config, workers = parts.config, parts.workers
    sampling_ranks = range(0) if workers.sender is None else workers.rollout.ranks
    phases = Phases(workers.pool.spans.take, parts.phase, sampling_ranks)
    kl = KLControl(config.algorithm.kl)
    engine = engine_of(workers, config.fsdp.offload)
    guard = NonFiniteGuard(config, parts.run_dir, parts.checkpoints.write_state)
    sizes = update_sizes(config.actor, workers.actor.num_shards, parts.shape)
    updates = Updates(config, workers, engine, kl, guard, sizes, phases)
    every_steps = config.trainer.samples_every_steps
    observer = Observers(observers(updates, guard), every_steps, phases.section)
    lengths = ResponseLengths()
    generation = Generation(parts.generator, engine, lengths)
    source = open_source(
        SourceParts(
            config,
            parts.prompts.take,
            generation,
            parts.rewards,
            workers.rollout,
            partial(trains_policy, config),
            phases.section,
        )
    )
    state = TrainState(parts.prompts, kl, engine, guard, lengths, source)
    rollouts = Rollouts(source, generation, engine, workers.rollout, phases)
    training: PPO | SFT = supervised(config, parts.prompts, updates)
    if not is_supervised(config):
        place = partial(engine_place, workers.rollout)
        scoring = Scoring(config, workers, parts.rewards, sizes, phases, place, observer)
        advantages = Advantages(config.algorithm, config.teacher, config.seed, kl, phases)
        seen = parts.prompts.with_images(PROMPTS)
        start = StartCheck(config, parts.shape, workers.rollout, updates, phases, seen)
        given = GivenAnswers(config, parts.prompts, scoring, updates)
        training = PPO(rollouts, start, scoring, advantages, updates, given)
    held_out = training.held_out if isinstance(training, SFT) else None
    accuracy = math.nan if parts.resume is None else parts.resume.last_accuracy
    observed = parts.preemption, observer, held_out, not trains_reward_model(config), accuracy
    evaluations = Evaluations(parts.evaluator, rollouts, phases, *observed)
    signals, checkpoints = parts.preemption, parts.checkpoints
    of_run = parts.run_dir, parts.warn, parts.resume
    saves = Saves(config, workers, state, checkpoints, signals, phases, *of_run)
    profiler = StepProfiler(config.trainer.profile_steps, workers.pool, parts.run_dir, phases)
    return TrainingLoop(config, training, evaluations, saves, phases, profiler, observer, parts.run)
