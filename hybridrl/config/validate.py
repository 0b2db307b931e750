"""All checks of a typed config, each with the keys that it reads.

A check is skipped if one of its keys has no usable value. So checks need not handle wrong types,
and one error does not cause another message.
"""

from collections.abc import Callable, Iterable, Iterator

from hybridrl.config.checks import algorithm, resources, sequences, sizes
from hybridrl.config.checks.checkpoint import (
    restart_problems,
    resume_problems,
    retention_problems,
)
from hybridrl.config.checks.data import mixture_problems
from hybridrl.config.checks.effects import effect_problems
from hybridrl.config.checks.environment import environment_problems
from hybridrl.config.checks.lora import lora_problems
from hybridrl.config.checks.memory import memory_problems, offload_problems
from hybridrl.config.checks.reward_model import reward_model_problems, reward_shape_problems
from hybridrl.config.command.provenance import Provenance
from hybridrl.config.command.report import Report
from hybridrl.config.errors import ConfigError
from hybridrl.config.estimators import estimator_of, group_problems
from hybridrl.config.planner.machine import Machine
from hybridrl.config.planner.model_shape import ModelShape
from hybridrl.config.policy_losses import loss_problems
from hybridrl.config.schema import RunConfig
from hybridrl.config.user_code.classes import check_reward_function
from hybridrl.config.user_code.importing import check_import

RANKS = ("cluster.nodes", "cluster.gpus_per_node", "placement")
RESPONSES = ("data.prompts_per_step", "rollout.responses_per_prompt")
TP = "rollout.tensor_parallel_size"
SEQUENCES = ("fsdp.ulysses_size", "fsdp.dp_shard")
MINI_BATCHES = (*RANKS, *RESPONSES, "actor.mini_batch_size", "fsdp.ulysses_size")
MEMORY = (
    *RANKS,
    TP,
    "hardware.accelerator",
    "model",
    "fsdp",
    "lora",
    "algorithm.advantage",
    "algorithm.kl.coef",
    "actor.max_tokens_per_gpu",
    "actor.log_prob_chunk_tokens",
    "rollout.dtype",
    "rollout.kv_cache_mb",
    "rollout.gpu_memory_utilization",
    "rollout.reshard_bucket_mb",
    "rollout.sleep",
    "rollout.max_prompt_tokens",
    "rollout.max_response_tokens",
    "actor.mini_batch_size",
)
CONFIG_CHECKS: tuple[tuple[Callable[[RunConfig], Iterable[str]], tuple[str, ...]], ...] = (
    (sizes.mesh_problems, (*RANKS, "fsdp.dp_replicate", "fsdp.dp_shard")),
    (sizes.uneven_problems, RANKS),
    (sizes.engine_problems, (*RANKS, TP)),
    (sizes.layout_problems, (TP, "fsdp.tensor_parallel_size")),
    (sizes.prompt_problems, (*RANKS, TP, "data.prompts_per_step")),
    (sequences.sequence_problems, SEQUENCES),
    (sizes.mini_batch_problems, MINI_BATCHES),
    (sizes.mini_batch_rank_problems, MINI_BATCHES),
    (algorithm.kl_problems, (*RESPONSES, "algorithm.kl")),
    (resume_problems, ("resume",)),
    (retention_problems, ("checkpoint", "eval", "trainer.total_steps")),
    (restart_problems, ("trainer.max_restarts", "checkpoint.every_steps")),
    (
        group_problems,
        ("algorithm.advantage", "algorithm.pass_k", "rollout.responses_per_prompt"),
    ),
    (algorithm.correction_problems, ("algorithm.rollout_correction",)),
    (algorithm.overlong_problems, ("algorithm.overlong", "rollout.max_response_tokens")),
    (
        algorithm.sampling_problems,
        ("algorithm.max_sampling_rounds", "rollout.responses_per_prompt"),
    ),
    (sizes.port_problems, ("cluster.rendezvous_ports",)),
    (sizes.betas_problems, ("actor.optim.betas", "critic.optim.betas")),
    (
        sizes.step_problems,
        (
            "algorithm.advantage",
            "trainer.total_steps",
            "trainer.critic_warmup_steps",
            "actor.optim.warmup_steps",
            "critic.optim.warmup_steps",
        ),
    ),
    (sizes.profile_problems, ("trainer.total_steps", "trainer.profile_steps")),
    (
        sizes.temperature_problems,
        ("rollout.temperature", "actor.temperature", "ref.temperature"),
    ),
    (offload_problems, ("hardware.accelerator", "fsdp.offload")),
    (resources.kv_cache_problems, ("hardware.accelerator", "rollout.kv_cache_mb")),
    (resources.package_problems, ("tracking",)),
    (environment_problems, ("environment",)),
    (
        reward_model_problems,
        (
            "reward_model.weight",
            "reward.function",
            "environment",
            "algorithm.advantage",
            "algorithm.max_sampling_rounds",
        ),
    ),
)
MACHINE_CHECKS: tuple[
    tuple[Callable[[RunConfig, Machine], Iterable[str]], tuple[str, ...]], ...
] = (
    (resources.accelerator_problems, ("hardware.accelerator", "run.dry")),
    (resources.node_problems, ("cluster.nodes",)),
    (resources.slot_problems, (*RANKS, "hardware.accelerator")),
)
MODEL_CHECKS: tuple[
    tuple[Callable[[RunConfig, ModelShape], Iterable[str]], tuple[str, ...]], ...
] = (
    (sizes.length_problems, ("rollout.max_prompt_tokens", "rollout.max_response_tokens")),
    (sizes.tensor_parallel_problems, (TP,)),
    (sequences.sequence_head_problems, SEQUENCES),
    (lora_problems, ("lora",)),
)
REWARD_MODEL = (
    "reward_model",
    "rollout.max_prompt_tokens",
    "rollout.max_response_tokens",
    "fsdp.ulysses_size",
)
# Checks of evaluations, which do not train.
OF_EVALUATIONS: tuple[Callable[..., Iterable[str]], ...] = (
    sizes.mesh_problems,
    sizes.uneven_problems,
    sizes.engine_problems,
    sizes.layout_problems,
    sizes.port_problems,
    offload_problems,
    resources.kv_cache_problems,
    environment_problems,
    sizes.length_problems,
    sizes.tensor_parallel_problems,
)
EFFECT_NEEDS = (
    "algorithm.advantage",
    "algorithm.kl.coef",
    "algorithm.kl.target",
    "algorithm.loss",
    "algorithm.rollout_correction",
    "algorithm.overlong",
    "lora.rank",
    "actor.optim.schedule",
    "critic.optim.schedule",
    "hardware.accelerator",
    "data.train_files",
    "data.few_shot",
    "data.curriculum",
    "data.mixture",
    "model.init",
    "fsdp.dp_shard",
    "fsdp.layout",
    "fsdp.tensor_parallel_size",
    *RANKS,
    TP,
)

Check = tuple[Iterable[str], tuple[str, ...]]
Checks = Callable[
    [RunConfig, Machine, ModelShape | None, ModelShape | None, Provenance, Report], None
]


def run_checks(
    config: RunConfig,
    machine: Machine,
    shape: ModelShape | None,
    reward_shape: ModelShape | None,
    provenance: Provenance,
    report: Report,
) -> None:
    """Add every problem of a typed config to `report`.

    Args:
        config: typed and resolved as far as possible.
        machine: nodes that the run may use.
        shape: the model's; None if it could not be read, which is reported already.
        reward_shape: the reward model's, likewise; None also without a reward model.
        provenance: keys that the user set.
        report: collects problems; its broken keys decide which checks are skipped.
    """
    _check_estimator(config, report)
    _check_loss(config, report)
    checks = [
        *_common_checks(config, machine, shape, lambda check: True),
        (effect_problems(config, provenance), EFFECT_NEEDS),
    ]
    if shape is not None:
        checks.append((memory_problems(config, shape, machine, reward_shape), MEMORY))
        if reward_shape is not None:
            checks.append((reward_shape_problems(config, shape, reward_shape), REWARD_MODEL))
    _run(checks, report)
    _check_data(config, report)


def run_evaluation_checks(
    config: RunConfig,
    machine: Machine,
    shape: ModelShape | None,
    reward_shape: ModelShape | None,
    provenance: Provenance,
    report: Report,
) -> None:
    """Add every problem of an evaluation's config to `report`; as `run_checks`."""
    _run(_common_checks(config, machine, shape, OF_EVALUATIONS.__contains__), report)
    _check_data(config, report)


def _common_checks(
    config: RunConfig,
    machine: Machine,
    shape: ModelShape | None,
    applies: Callable[[Callable[..., Iterable[str]]], bool],
) -> Iterator[Check]:
    """Yield the checks of runs and evaluations, with the keys that each one reads.

    Args:
        config, machine, shape: as in `run_checks`.
        applies: selects from CONFIG_CHECKS and MODEL_CHECKS.
    """
    yield from ((check(config), needs) for check, needs in CONFIG_CHECKS if applies(check))
    yield from ((check(config, machine), needs) for check, needs in MACHINE_CHECKS)
    yield _reward_problems(config), ("reward", "eval.rules")
    if shape is not None:
        yield from (
            (check(config, shape), needs) for check, needs in MODEL_CHECKS if applies(check)
        )


def _run(checks: Iterable[Check], report: Report) -> None:
    """Add the problems of all checks whose keys are usable; other generators are not started."""
    found = [p for problems, needs in checks if report.usable(needs) for p in problems]
    for problem in found:
        report.add(problem)


def _check_loss(config: RunConfig, report: Report) -> None:
    if report.usable(["algorithm.loss"]):
        for problem in loss_problems(config.algorithm.loss):
            report.add(problem, broken="algorithm.loss")


def _check_estimator(config: RunConfig, report: Report) -> None:
    if report.usable(["algorithm.advantage"]):
        try:
            check_import("algorithm.advantage", config.algorithm.advantage)
            estimator_of(config.algorithm.advantage)
        except ConfigError as error:
            for problem in error.problems:
                report.add(problem, broken="algorithm.advantage")


def _check_data(config: RunConfig, report: Report) -> None:
    """Check the sources of data; broken ones are not read later."""
    if report.usable(["data.mixture"]):
        for problem in mixture_problems(config):
            report.add(problem, broken="data.mixture")
    for key, value in (
        ("data.train_files", config.data.train_files),
        ("data.eval_files", config.data.eval_files),
    ):
        for problem in resources.file_problems(key, value):
            report.add(problem, broken=key)


def _reward_problems(config: RunConfig) -> Iterator[str]:
    functions = {"reward": config.reward} | {
        f"eval.rules.{name}": rule for name, rule in config.eval.rules.items()
    }
    for name in config.eval.rules:
        if not name.isidentifier() or name.partition("_")[0] in ("greedy", "sampled"):
            yield (
                f"eval.rules.{name}: expected a name of letters, digits and _ that does not begin "
                f"with greedy or sampled: it is part of eval/accuracy_<name>.\nRename it."
            )
    for key, rule in functions.items():
        try:
            check_reward_function(key, rule.function, rule.args)
        except ConfigError as error:
            yield from error.problems
