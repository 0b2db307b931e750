"""All checks of a typed config, but for memory (checks/memory.py).

A check ends at the first value that it reads and that has no usable value (`Unusable`). So checks
need not handle wrong types, and one error does not cause another message. A check may also raise
its last problems as a ConfigError.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress

from hybridrl.config.annotations import NoValue, Unusable, set_value, value_at
from hybridrl.config.changes import FOLLOWING, STEPS
from hybridrl.config.checks import algorithm, checkpoint, data, resources, sizes
from hybridrl.config.checks.exact import exact_problems
from hybridrl.config.checks.fp8 import fp8_problems
from hybridrl.config.checks.frozen_models import frozen_shape_problems
from hybridrl.config.checks.installation import head_size_problems
from hybridrl.config.checks.reward_model import reward_model_problems
from hybridrl.config.checks.teacher import teacher_problems
from hybridrl.config.command.provenance import Provenance
from hybridrl.config.errors import ConfigError, Problem, Report
from hybridrl.config.estimators import estimator_problems, group_problems
from hybridrl.config.planner.machine import Machine
from hybridrl.config.planner.shape import Frozen, ModelShape
from hybridrl.config.policy_losses import loss_problems
from hybridrl.config.schema import RunConfig
from hybridrl.config.user_code.classes import (
    agent_problems,
    callback_problems,
    environment_problems,
    reward_problems,
)
from hybridrl.config.variants import variant_problems

# Checks of runs and evaluations.
COMMON_CHECKS = (
    sizes.mesh_problems,
    sizes.uneven_problems,
    sizes.engine_problems,
    sizes.port_problems,
    resources.cpu_problems,
    environment_problems,
    agent_problems,
    reward_problems,
    data.reference_problems,
    data.template_problems,
)
TRAINING_CHECKS = (
    sizes.prompt_problems,
    sizes.sequence_problems,
    sizes.mini_batch_problems,
    algorithm.kl_problems,
    checkpoint.resume_problems,
    checkpoint.restart_problems,
    group_problems,
    algorithm.correction_problems,
    algorithm.overlong_problems,
    algorithm.sampling_problems,
    algorithm.nucleus_problems,
    algorithm.split_problems,
    algorithm.schedule_problems,
    algorithm.keep_kv_problems,
    algorithm.agent_problems,
    algorithm.supervised_problems,
    sizes.betas_problems,
    resources.package_problems,
    reward_model_problems,
    teacher_problems,
    callback_problems,
)
# Share of a step that rounding of trainer.epochs may add.
_ROUNDING = 1e-9
# Checks of the run's length, which trainer.epochs sets once the data is read (`set_steps`).
STEP_CHECKS = (sizes.step_problems, checkpoint.retention_problems)
MACHINE_CHECKS = (
    resources.accelerator_problems,
    resources.node_problems,
    resources.slot_problems,
)
COMMON_MODEL_CHECKS = (
    sizes.length_problems,
    sizes.tensor_parallel_problems,
    sizes.cache_problems,
    head_size_problems,
    fp8_problems,
)
TRAINING_MODEL_CHECKS = (
    sizes.sequence_head_problems,
    sizes.vision_problems,
    algorithm.lora_problems,
    algorithm.expert_problems,
    algorithm.recurrent_problems,
    algorithm.forward_problems,
    algorithm.sharing_problems,
    exact_problems,
)


def run_checks(
    config: RunConfig,
    machine: Machine,
    shape: ModelShape | None,
    frozen: Frozen,
    provenance: Provenance,
    report: Report,
    *,
    trains: bool,
) -> None:
    """Add every problem of a typed config to `report`; `trains` is false for an evaluation.

    The shapes of models are None if they could not be read, which is reported already.
    """
    if trains:
        for key, problems_of in (("advantage", estimator_problems), ("loss", loss_problems)):
            before = len(report.problems)
            run([problems_of(config)], report)
            if len(report.problems) > before:  # other checks do not use a wrong one
                set_value(config, f"algorithm.{key}", NoValue(f"algorithm.{key}"))
    checks: list[Iterable[Problem | str]] = [check(config) for check in COMMON_CHECKS]
    checks += [check(config, machine) for check in MACHINE_CHECKS]
    if shape is not None:
        checks += [check(config, shape) for check in COMMON_MODEL_CHECKS]
    if trains:
        checks += [check(config) for check in TRAINING_CHECKS]
        checks.append(variant_problems(config, provenance))
        checks += [_unless_of_epochs(config, check(config)) for check in STEP_CHECKS]
    if trains and shape is not None:
        checks += [check(config, shape) for check in TRAINING_MODEL_CHECKS]
        checks += [frozen_shape_problems(config, shape, model) for model in frozen]
    run(checks, report)
    for key, problems in data.source_problems(config):
        run([problems], report, broken=key)


def set_steps(config: RunConfig, num_prompts: int, report: Report) -> None:
    """Set the steps of trainer.epochs, if it is set, and add the problems of this length.

    Each step trains data.prompts_per_step prompts, and the last pass is whole. Keys that link to
    trainer.total_steps follow.
    """
    if not report.usable(["trainer", "data.prompts_per_step"]) or config.trainer.epochs is None:
        return
    # Given answers are those of as many prompts as a step has responses.
    given = 0.0 if config.teacher is None else config.teacher.given_fraction
    each = 1 + given * (config.rollout.responses_per_prompt - 1)
    steps = config.trainer.epochs * num_prompts / (config.data.prompts_per_step * each)
    total, before = max(1, math.ceil(steps - _ROUNDING)), config.trainer.total_steps
    for key in (STEPS, *FOLLOWING[STEPS]):
        if report.usable([key]) and value_at(config, key) == before:
            set_value(config, key, total)
    run([check(config) for check in STEP_CHECKS], report)


def _unless_of_epochs(config: RunConfig, problems: Iterable[Problem]) -> Iterator[Problem]:
    if config.trainer.epochs is None:
        yield from problems


def run(
    checks: Iterable[Iterable[Problem | str]], report: Report, *, broken: str | None = None
) -> None:
    """Add the problems of checks, each as far as its keys have usable values."""
    for problems in checks:
        with suppress(Unusable):
            try:
                for problem in problems:
                    report.add(problem, broken=broken)
            except ConfigError as error:
                report.problems += error.problems
