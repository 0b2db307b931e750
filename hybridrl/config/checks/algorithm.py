"""Checks of conf/algorithm and conf/lora: penalties, corrections, sampling, adapters."""

import difflib
from collections.abc import Iterator
from operator import attrgetter

from hybridrl.config.choices import (
    Accelerator,
    CorrectionMethod,
    DType,
    KLEstimator,
    KLPlacement,
    RouterReplay,
    Schedule,
    SleepMode,
)
from hybridrl.config.estimators import estimator_of, is_supervised
from hybridrl.config.planner.model_shape import ModelShape
from hybridrl.config.policy_losses import policy_loss_of
from hybridrl.config.schema import RunConfig
from hybridrl.config.sections.algorithm import MAX_RELATIVE_KL_ERROR


def kl_problems(config: RunConfig) -> Iterator[str]:
    """Find estimators that do not fit the placement, and a horizon that is too short."""
    kl = config.algorithm.kl
    if kl.coef == 0:
        return
    if kl.placement is KLPlacement.loss and kl.estimator is KLEstimator.k1:
        yield (
            "algorithm.kl.estimator = k1 with algorithm.kl.placement = loss has an expected "
            "gradient of 0: it adds noise and no penalty.\n"
            "Set algorithm.kl.estimator=k2 (its gradient is that of the KL), k1_straight_through "
            "(k1's value with that gradient) or k3, or algorithm.kl.placement=reward."
        )
    base = kl.estimator.removesuffix("_straight_through")
    if kl.placement is KLPlacement.reward and base != kl.estimator:
        yield (
            f"algorithm.kl.estimator = {kl.estimator} with algorithm.kl.placement = reward: only "
            f"its gradient differs from that of {base}, and a reward has no gradient.\n"
            f"Set algorithm.kl.estimator={base}, or algorithm.kl.placement=loss."
        )
    responses = config.data.prompts_per_step * config.rollout.responses_per_prompt
    shortest = int(MAX_RELATIVE_KL_ERROR * responses) + 1
    if kl.target is not None and kl.horizon < shortest:
        yield (
            f"algorithm.kl.horizon = {kl.horizon}, expected at least {shortest}: with the "
            f"{responses} responses of a step the coefficient could fall to 0 in one step, for "
            f"good.\n"
            f"Set algorithm.kl.horizon={20 * responses} for slow changes."
        )


def correction_problems(config: RunConfig) -> Iterator[str]:
    """Check that the bounds of importance ratios contain 1."""
    correction = config.algorithm.rollout_correction
    key = "algorithm.rollout_correction"
    agree = "1, the ratio of a token on which vLLM and the trainer agree"
    if correction.method is not CorrectionMethod.none and correction.high < 1:
        yield f"{key}.high = {correction.high}, expected at least {agree}.\nSet {key}.high=2."
    if correction.method is CorrectionMethod.mask and correction.low >= 1:
        yield f"{key}.low = {correction.low}, expected less than {agree}.\nSet {key}.low=0.5."


def overlong_problems(config: RunConfig) -> Iterator[str]:
    """Check that the overlong buffer fits into a response."""
    buffer, longest = config.algorithm.overlong.buffer_tokens, config.rollout.max_response_tokens
    if buffer > longest:
        yield (
            f"algorithm.overlong.buffer_tokens = {buffer}, expected at most "
            f"rollout.max_response_tokens = {longest}: the penalty acts on a response's last "
            f"tokens.\n"
            f"Set algorithm.overlong.buffer_tokens={max(1, longest // 5)} or less."
        )


def sampling_problems(config: RunConfig) -> Iterator[str]:
    """Check that dynamic sampling has several responses per prompt to compare."""
    rounds, each = config.algorithm.max_sampling_rounds, config.rollout.responses_per_prompt
    if rounds > 1 and each < 2:
        yield (
            f"algorithm.max_sampling_rounds = {rounds}, but rollout.responses_per_prompt = {each}: "
            f"dynamic sampling keeps prompts whose responses differ in reward.\n"
            f"Set rollout.responses_per_prompt=2 or more, or algorithm.max_sampling_rounds=1."
        )


def split_problems(config: RunConfig) -> Iterator[str]:
    """Check that some ranks only sample if, and only if, the schedule is split."""
    ranks, schedule = config.placement.rollout_gpus, config.rollout.schedule
    if schedule is Schedule.split and ranks is None and not is_supervised(config):
        yield (
            "rollout.schedule = split, but placement.rollout_gpus = null: some ranks must only "
            "sample, while the others train.\n"
            "Set placement.rollout_gpus to their number, or rollout.schedule=partial."
        )
    if ranks is not None and (schedule is not Schedule.split or is_supervised(config)):
        supervised = " of supervised fine-tuning, which samples nothing to train on"
        yield (
            f"placement.rollout_gpus = {ranks} with rollout.schedule = {schedule}"
            f"{supervised if is_supervised(config) else ''}: these ranks would idle during "
            f"updates, and the others during sampling.\n"
            f"Remove placement.rollout_gpus, or set rollout.schedule=split."
        )


def agent_problems(config: RunConfig) -> Iterator[str]:
    """Find algorithms that need exactly one token sequence per response."""
    if config.agent is None:
        return
    algorithm, why = config.algorithm, "does not work with environment=agent yet"
    if algorithm.max_sampling_rounds > 1:
        rounds = algorithm.max_sampling_rounds
        yield (
            f"algorithm.max_sampling_rounds = {rounds} {why}.\nSet algorithm.max_sampling_rounds=1."
        )
    if estimator_of(algorithm.advantage).needs_greedy_responses:
        yield f"algorithm.advantage = {algorithm.advantage} {why}.\nSet algorithm=rloo."
    if is_supervised(config):
        yield "environment=agent: supervised fine-tuning runs no programs.\nSet environment=none."


def schedule_problems(config: RunConfig) -> Iterator[str]:
    """Check what responses that take several steps need."""
    rollout, algorithm = config.rollout, config.algorithm
    if rollout.schedule is Schedule.sync or is_supervised(config):
        return
    key, per_step = f"rollout.schedule = {rollout.schedule}", config.data.prompts_per_step
    if config.agent is not None and rollout.schedule is Schedule.split:
        yield f"{key} does not work with environment=agent yet.\nSet rollout.schedule=partial."
    is_against_rollout = policy_loss_of(algorithm.loss.function).is_against_rollout
    if algorithm.rollout_correction.method is CorrectionMethod.none and not is_against_rollout:
        yield (
            f"{key} trains on tokens of earlier weights, but algorithm.rollout_correction.method = "
            f"none takes them for tokens of the present ones.\n"
            f"Set algorithm.rollout_correction.method=truncate."
        )
    assert rollout.max_in_flight is not None, "derived before"
    # With split the first step in which a token can be trained is an update later.
    steps = rollout.max_versions + (rollout.schedule is Schedule.partial)
    most = max(1, steps) * per_step
    if not per_step <= rollout.max_in_flight <= most:
        yield (
            f"rollout.max_in_flight = {rollout.max_in_flight}, expected {per_step} "
            f"(data.prompts_per_step) to {most}: more could not be trained within "
            f"rollout.max_versions = {rollout.max_versions} updates.\n"
            f"Set rollout.max_in_flight={min(2 * per_step, most)}, or more rollout.max_versions."
        )


def keep_kv_problems(config: RunConfig) -> Iterator[str]:
    """Check that unfinished responses stay in vLLM between steps, if they keep their KV cache."""
    rollout, advantage = config.rollout, config.algorithm.advantage
    if not rollout.keep_kv or rollout.schedule is Schedule.sync:
        return
    is_awake = rollout.schedule is Schedule.split or rollout.sleep is SleepMode.none
    on_gpu, off = config.hardware.accelerator is Accelerator.gpu, "rollout.keep_kv=false"
    for is_so, why, remedy in (
        (config.agent is not None, "environment=agent computes prefixes anew", off),
        (
            estimator_of(advantage).needs_greedy_responses,
            f"the greedy responses of algorithm.advantage = {advantage} end requests in each step",
            f"algorithm=rloo or {off}",
        ),
        (
            on_gpu and not is_awake,
            f"rollout.sleep = {rollout.sleep} frees the KV cache in each step",
            f"rollout.sleep=none or {off}",
        ),
    ):
        if is_so:
            yield f"rollout.keep_kv = true, expected false: {why}.\nSet {remedy}."


def supervised_problems(config: RunConfig) -> Iterator[str]:
    """Check the keys that supervised fine-tuning needs at one value."""
    loss = config.algorithm.loss.function
    if not is_supervised(config):
        if loss == "nll":
            yield (
                "algorithm.loss.function = nll ignores the reward: it would train on every sampled "
                "response alike.\n"
                "Set algorithm=sft to train on reference answers, or algorithm/loss=ppo_clip."
            )
        return
    why = "algorithm.advantage = none, supervised fine-tuning"
    known = ("log_probs", "response_mask", "sequence_id")
    lacking = [name for name in policy_loss_of(loss).tensors if name not in known]
    if lacking:
        yield (
            f"algorithm.loss.function = {loss} needs {', '.join(lacking)}, which reference answers "
            f"do not have ({why}).\nSet algorithm/loss=nll."
        )
    for key, needed, because in (
        ("algorithm.kl.coef", 0, "the loss is the likelihood of the reference answers alone"),
        ("rollout.responses_per_prompt", 1, "a prompt has one reference answer"),
        (
            "actor.temperature",
            1,
            "it trains the distribution itself; rollout.temperature is that of the evaluation",
        ),
    ):
        value = attrgetter(key)(config)
        if value != needed:
            problem = f"{key} = {value:g}, expected {needed} with {why}: {because}."
            yield f"{problem}\nSet {key}={needed}."


def expert_problems(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    """Check the load-balancing loss, which needs whole sequences, and compilation of experts."""
    coef, fsdp = config.actor.router_balance_coef, config.fsdp
    if shape.experts is not None and fsdp.compile and fsdp.param_dtype is DType.float32:
        yield (
            "fsdp.compile = true with fsdp.param_dtype = float32: grouped matrix products of "
            "experts can be compiled in bfloat16 only.\n"
            "Set fsdp.compile=false or fsdp.param_dtype=bfloat16."
        )
    if coef and shape.experts is None:
        yield (
            f"actor.router_balance_coef = {coef:g}, expected 0: model.path has no experts to "
            "balance.\nSet actor.router_balance_coef=0."
        )
    if coef and fsdp.ulysses_size > 1:
        yield (
            f"actor.router_balance_coef = {coef:g} with fsdp.ulysses_size = "
            f"{fsdp.ulysses_size}: the loss is of whole sequences, which ranks share.\n"
            "Set actor.router_balance_coef=0 or fsdp.ulysses_size=1."
        )
    tp, number = config.rollout.tensor_parallel_size, shape.experts and shape.experts.number
    if config.rollout.expert_parallel and (number is None or number % tp):
        yield (
            f"rollout.expert_parallel = true with {number or 'no'} experts in model.path and "
            f"rollout.tensor_parallel_size = {tp}: each rank of an engine holds equally many.\n"
            "Set rollout.expert_parallel=false."
        )
    yield from replay_problems(config, shape)


def replay_problems(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    """Check that responses are sampled whole and by experts, if a run records these."""
    rollout = config.rollout
    if rollout.router_replay is RouterReplay.none:
        return
    for is_so, why in (
        (shape.experts is None, "model.path has no experts to record"),
        (
            rollout.schedule is not Schedule.sync,
            f"with rollout.schedule = {rollout.schedule}, experts of earlier weights are not kept",
        ),
        (config.earns_rewards, "experts of earlier turns of a conversation are not kept"),
    ):
        if is_so:
            found = f"rollout.router_replay = {rollout.router_replay}, expected none"
            yield f"{found}: {why}.\nSet rollout.router_replay=none."


def lora_problems(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    """Find unknown layers and ranks above the size of a weight."""
    lora, layers = config.lora, shape.linear_layers
    if lora is None:
        return
    if not lora.target_modules:
        yield (
            "lora.target_modules = [], expected at least one linear layer: otherwise nothing is "
            f"trained.\nUse some of {', '.join(layers)}, or set lora=none."
        )
    unknown = [name for name in lora.target_modules if name not in layers]
    for name in unknown:
        near = difflib.get_close_matches(name, layers, n=1)
        meant = f" Did you mean {near[0]}?" if near else ""
        yield (
            f"lora.target_modules contains {name}, which is not a linear layer of the decoder."
            f"{meant}\nUse some of {', '.join(layers)}."
        )
    if unknown or not lora.target_modules:
        return
    smallest, name = min((min(layers[name]), name) for name in lora.target_modules)
    if lora.rank > smallest:
        yield (
            f"lora.rank = {lora.rank}, expected at most {smallest}, the smaller dimension of "
            f"{name}: a higher rank adds parameters without effect.\n"
            f"Set lora.rank={smallest}, or remove {name} from lora.target_modules."
        )
