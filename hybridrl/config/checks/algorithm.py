"""Checks of conf/algorithm and conf/lora: penalties, corrections, sampling, adapters."""

import difflib
from collections.abc import Iterator

from hybridrl.config.checks.installation import is_current
from hybridrl.config.checks.sizes import steps_in_flight
from hybridrl.config.choices import (
    IN_PARTS,
    ON_OWN_RANKS,
    Accelerator,
    Aggregation,
    CorrectionMethod,
    DType,
    KLEstimator,
    KLPlacement,
    RouterReplay,
    SleepMode,
    Targets,
)
from hybridrl.config.errors import Problem, must_be
from hybridrl.config.estimators import estimator_of, is_supervised
from hybridrl.config.planner.families import not_adapted
from hybridrl.config.planner.shape import ModelShape
from hybridrl.config.policy_losses import policy_loss_of, targets_of
from hybridrl.config.schema import RunConfig
from hybridrl.config.sections import MAX_RELATIVE_KL_ERROR

SFT = "algorithm.advantage = none, supervised fine-tuning"


def kl_problems(config: RunConfig) -> Iterator[Problem]:
    """Find estimators that do not fit the placement, and a horizon that is too short."""
    kl, key = config.algorithm.kl, "algorithm.kl.estimator"
    if kl.coef == 0:
        return
    placed = f"with algorithm.kl.placement = {kl.placement}"
    if kl.placement is KLPlacement.loss and kl.estimator is KLEstimator.k1:
        why = "its expected gradient is 0, so that it adds noise and no penalty"
        remedy = (
            f"Set {key}=k2 (its gradient is that of the KL), k1_straight_through (k1's value with "
            f"that gradient) or k3, or algorithm.kl.placement=reward"
        )
        yield Problem("kl_no_gradient", key, kl.estimator, f"another {placed}", why, remedy)
    base = kl.estimator.removesuffix("_straight_through")
    if kl.placement is KLPlacement.reward and base != kl.estimator:
        why = f"only its gradient differs from that of {base}, and a reward has no gradient"
        remedy = f"Set {key}={base}, or algorithm.kl.placement=loss"
        yield Problem("kl_unused_gradient", key, kl.estimator, f"{base} {placed}", why, remedy)
    responses = config.data.prompts_per_step * config.rollout.responses_per_prompt
    shortest = int(MAX_RELATIVE_KL_ERROR * responses) + 1
    if kl.target is not None and kl.horizon < shortest:
        key, why = "algorithm.kl.horizon", f"with the {responses} responses of a step the "
        why += "coefficient could fall to 0 in one step, for good"
        remedy = f"Set {key}={20 * responses} for slow changes"
        yield Problem("kl_horizon", key, kl.horizon, f"at least {shortest}", why, remedy)


def correction_problems(config: RunConfig) -> Iterator[Problem]:
    """Check that the bounds of importance ratios contain 1."""
    correction, key = config.algorithm.rollout_correction, "algorithm.rollout_correction"
    low, high, agree = correction.low, correction.high, "vLLM and the trainer agree at a ratio of 1"
    if correction.method is not CorrectionMethod.none and high < 1:
        yield Problem("ratios", f"{key}.high", high, "at least 1", agree, f"Set {key}.high=2")
    if correction.method is CorrectionMethod.mask and low >= 1:
        yield Problem("ratios", f"{key}.low", low, "less than 1", agree, f"Set {key}.low=0.5")


def overlong_problems(config: RunConfig) -> Iterator[Problem]:
    """Check that the overlong buffer fits into a response."""
    buffer, longest = config.algorithm.overlong.buffer_tokens, config.rollout.max_response_tokens
    if buffer > longest:
        key, why = "algorithm.overlong.buffer_tokens", "it is the end of the longest response"
        expected = f"at most rollout.max_response_tokens = {longest}"
        remedy = f"Set {key}={max(1, longest // 5)} or less"
        yield Problem("overlong_buffer", key, buffer, expected, why, remedy)


def sampling_problems(config: RunConfig) -> Iterator[Problem]:
    """Check that dynamic sampling has several responses per prompt to compare."""
    rounds, each = config.algorithm.max_sampling_rounds, config.rollout.responses_per_prompt
    if rounds > 1 and each < 2:
        why = f"it compares responses to a prompt, and rollout.responses_per_prompt = {each}"
        more = ", or rollout.responses_per_prompt=2 or more"
        yield must_be("lone_response", "algorithm.max_sampling_rounds", rounds, 1, why, more)


def split_problems(config: RunConfig) -> Iterator[Problem]:
    """Check that some ranks only sample if, and only if, the schedule is split."""
    ranks, schedule = config.placement.rollout_gpus, config.rollout.schedule
    key, supervised = "placement.rollout_gpus", is_supervised(config)
    if schedule in ON_OWN_RANKS and ranks is None and not supervised:
        expected = f"a number with rollout.schedule = {schedule}"
        why = "some ranks must only sample"
        remedy = f"Set {key} to their number, or rollout.schedule=partial"
        yield Problem("split_needs_ranks", key, None, expected, why, remedy)
    if ranks is not None and (schedule not in ON_OWN_RANKS or supervised):
        with_ = SFT if supervised else f"rollout.schedule = {schedule}"
        why = "these ranks would idle during updates, and the others during sampling"
        remedy = f"Remove {key}, or set rollout.schedule=split"
        yield Problem("ranks_need_split", key, ranks, f"null with {with_}", why, remedy)


def agent_problems(config: RunConfig) -> Iterator[Problem]:
    """Find algorithms that need exactly one token sequence per response."""
    if config.agent is None:
        return
    algorithm, schedule = config.algorithm, config.rollout.schedule
    rounds, why = algorithm.max_sampling_rounds, "environment=agent does not work with it yet"
    if rounds > 1:
        yield must_be("agent", "algorithm.max_sampling_rounds", rounds, 1, why)
    if estimator_of(algorithm.advantage).needs_greedy_responses:
        key = "algorithm.advantage"
        yield Problem("agent", key, algorithm.advantage, "another", why, "Set algorithm=rloo")
    if is_supervised(config):
        why = "supervised fine-tuning runs no programs"
        yield Problem("agent", "environment", "agent", "none", why, "Set environment=none")
    elif schedule in ON_OWN_RANKS:
        yield must_be("agent", "rollout.schedule", schedule, "partial", why)


def schedule_problems(config: RunConfig) -> Iterator[Problem]:
    """Check what responses that take several steps need."""
    rollout, algorithm = config.rollout, config.algorithm
    if rollout.schedule not in IN_PARTS or is_supervised(config):
        return
    method, per_step = algorithm.rollout_correction.method, config.data.prompts_per_step
    is_against_rollout = policy_loss_of(algorithm.loss.function).is_against_rollout
    corrects = method is not CorrectionMethod.none or rollout.exact  # its old log-probs are vLLM's
    if not corrects and not is_against_rollout:
        key, expected = "algorithm.rollout_correction.method", "truncate or mask"
        why = f"rollout.schedule = {rollout.schedule} trains on tokens of earlier weights"
        yield Problem("stale_tokens", key, method, expected, why, f"Set {key}=truncate")
    assert rollout.max_in_flight is not None, "derived before"
    most = steps_in_flight(rollout) * per_step
    if not per_step <= rollout.max_in_flight <= most:
        key, expected = "rollout.max_in_flight", f"{per_step} (data.prompts_per_step) to {most}"
        why = f"more could not be trained within rollout.max_versions = {rollout.max_versions}"
        remedy = f"Set {key}={min(2 * per_step, most)}, or more rollout.max_versions"
        yield Problem("max_in_flight", key, rollout.max_in_flight, expected, why, remedy)


def keep_kv_problems(config: RunConfig) -> Iterator[Problem]:
    """Check that unfinished responses stay in vLLM between steps, if they keep their KV cache."""
    rollout, advantage = config.rollout, config.algorithm.advantage
    if not rollout.keep_kv or rollout.schedule not in IN_PARTS:
        return
    sleeps = rollout.schedule not in ON_OWN_RANKS and rollout.sleep is not SleepMode.none
    on_gpu = config.hardware.accelerator is Accelerator.gpu
    greedy = f"the greedy responses of algorithm.advantage = {advantage} end requests in each step"
    for is_so, why, more in (
        (config.agent is not None, "environment=agent computes prefixes anew", ""),
        (estimator_of(advantage).needs_greedy_responses, greedy, " or algorithm=rloo"),
        (
            on_gpu and sleeps,
            f"rollout.sleep = {rollout.sleep} frees the KV cache in each step",
            " or rollout.sleep=none",
        ),
    ):
        if is_so:
            yield must_be("keep_kv", "rollout.keep_kv", True, "false", why, more)


def nucleus_problems(config: RunConfig) -> Iterator[Problem]:
    """Check that the tokens to which rollout.top_p cuts distributions can be recorded."""
    rollout, on_gpu = config.rollout, config.hardware.accelerator is Accelerator.gpu
    if rollout.top_p == 1 or is_supervised(config):
        return
    unequal = "without them log-probs of vLLM and trainer are of different distributions"
    for is_so, why in (
        (not on_gpu, "vLLM names the kept tokens on GPUs alone"),
        (on_gpu and not is_current(), "this version of vLLM does not name the kept tokens"),
        (
            rollout.schedule in IN_PARTS,
            f"with rollout.schedule = {rollout.schedule} the kept tokens are not recorded",
        ),
        (config.earns_rewards, "of conversations the kept tokens are not recorded"),
    ):
        if is_so:
            why, more = f"{why}; {unequal}", f" (evaluations: eval.top_p={rollout.top_p:g})"
            yield must_be("nucleus", "rollout.top_p", rollout.top_p, 1, why, more)


def supervised_problems(config: RunConfig) -> Iterator[Problem]:
    """Check the keys that supervised fine-tuning needs at one value."""
    loss, key = config.algorithm.loss.function, "algorithm.loss.function"
    targets = targets_of(config)
    if not is_supervised(config):
        if loss == "nll" or targets is not Targets.answers:
            why = "it ignores the reward, and would train on every sampled response alike"
            own = "sft" if loss == "nll" else loss
            remedy = f"Set algorithm={own} to train on {targets}, or algorithm/loss=ppo_clip"
            yield Problem("likelihood", key, loss, "a policy loss", why, remedy)
        return
    known = ["log_probs", "response_mask", "sequence_id"]
    if targets is not Targets.answers:
        known += ["ref_log_probs", "preferred", "kl_baseline", "scores"]
        kind = config.algorithm.aggregation
        if kind is not Aggregation.sequence_mean:
            why = f"{key} = {loss} is a mean over {targets}, not over tokens"
            yield must_be("supervised", "algorithm.aggregation", kind, "sequence_mean", why)
    if lacking := [name for name in policy_loss_of(loss).tensors if name not in known]:
        why = f"reference answers have no {', '.join(lacking)}"
        yield Problem("supervised", key, loss, f"nll with {SFT}", why, "Set algorithm/loss=nll")
    coef, each = config.algorithm.kl.coef, config.rollout.responses_per_prompt
    if coef:
        why = f"{SFT}: the loss is of the {targets} alone"
        yield must_be("supervised", "algorithm.kl.coef", coef, 0, why)
    if each != 1:
        why = f"{SFT}: a prompt has one reference answer"
        yield must_be("supervised", "rollout.responses_per_prompt", each, 1, why)


def expert_problems(config: RunConfig, shape: ModelShape) -> Iterator[Problem]:
    """Check the load-balancing loss and placement of experts, and their replay."""
    coef, fsdp, rollout = config.actor.router_balance_coef, config.fsdp, config.rollout
    key = "actor.router_balance_coef"
    if coef and shape.experts is None:
        yield must_be("no_experts", key, coef, 0, "model.path has no experts to balance")
    if coef and fsdp.ulysses_size > 1:
        why = f"the loss is of whole sequences, and fsdp.ulysses_size = {fsdp.ulysses_size}"
        yield must_be("balance_of_parts", key, coef, 0, why, " or fsdp.ulysses_size=1")
    tp, number = rollout.tensor_parallel_size, shape.experts and shape.experts.number
    if rollout.expert_parallel and (number is None or number % tp):
        why = (
            f"each of rollout.tensor_parallel_size = {tp} ranks holds equally many of the "
            f"{number or 'no'} experts in model.path"
        )
        yield must_be("expert_parallel", "rollout.expert_parallel", True, "false", why)
    if rollout.router_replay is RouterReplay.none:
        return
    earlier = f"with rollout.schedule = {rollout.schedule}, experts of earlier weights are not kept"
    for is_so, why in (
        (shape.experts is None, "model.path has no experts to record"),
        (rollout.schedule in IN_PARTS, earlier),
        (config.earns_rewards, "experts of earlier turns of a conversation are not kept"),
    ):
        if is_so:
            replay = rollout.router_replay
            yield must_be("router_replay", "rollout.router_replay", replay, "none", why)


def forward_problems(
    config: RunConfig, shape: ModelShape, owner: str = "model.path"
) -> Iterator[Problem]:
    """Find compilation and sharing of sequences that layers of a model do not have."""
    fsdp, key = config.fsdp, "fsdp.compile"
    if shape.experts is not None and fsdp.compile and fsdp.param_dtype is DType.float32:
        why = f"with fsdp.param_dtype = float32 products of experts of {owner} cannot be compiled"
        yield must_be("compiled_experts", key, True, "false", why, " or fsdp.param_dtype=bfloat16")
    if shape.recurrent and fsdp.ulysses_size > 1:
        own = f"recurrent layers of {owner} pass a state from token to token, which ranks cannot "
        own += "share"
        yield must_be("recurrent_parts", "fsdp.ulysses_size", fsdp.ulysses_size, 1, own)
    if fsdp.compile and shape.recurrent and shape.has_state:
        own = f"recurrent layers of {owner} compute chunks one after the other, whose number "
        yield must_be("compiled_recurrence", key, True, "false", f"{own}compilation would fix")
    if fsdp.compile and shape.kind == "gemma4_text":
        why = f"what layers of {owner} keep for later ones changes when they are recomputed"
        yield must_be("compiled_sharing", key, True, "false", why)


def sharing_problems(config: RunConfig, shape: ModelShape) -> Iterator[Problem]:
    """Find what tokens that are computed once for several sequences cannot have."""
    size = config.fsdp.ulysses_size
    yield from layer_sharing_problems(config, shape)
    yield from _unshared(
        config,
        {
            f"ranks share sequences (fsdp.ulysses_size = {size})": size > 1,
            "vLLM computes each sequence whole (rollout.exact = true)": config.rollout.exact,
        },
    )


def layer_sharing_problems(
    config: RunConfig, shape: ModelShape, owner: str = "model.path"
) -> Iterator[Problem]:
    """Find layers of a model that cannot compute tokens once for several sequences."""
    reasons = {
        f"recurrent layers of {owner} pass a state from token to token": shape.recurrent,
        f"experts of {owner} are balanced by sequence": shape.experts is not None,
        f"images of {owner} have positions of their own": shape.takes_images,
    }
    yield from _unshared(config, reasons)


def _unshared(config: RunConfig, reasons: dict[str, bool]) -> Iterator[Problem]:
    if config.fsdp.share_prefixes:
        for why in (reason for reason, is_so in reasons.items() if is_so):
            yield must_be("shared_prefixes", "fsdp.share_prefixes", True, "null", why)


def recurrent_problems(config: RunConfig, shape: ModelShape) -> Iterator[Problem]:
    """Find a replay of experts that recurrent layers do not have."""
    replay = config.rollout.router_replay
    if shape.recurrent and replay is not RouterReplay.none and shape.experts:
        own = "vLLM keeps states of recurrent layers of model.path in other blocks than tokens, by "
        own += "which experts are known"
        yield must_be("recurrent_replay", "rollout.router_replay", replay, "none", own)


def lora_problems(config: RunConfig, shape: ModelShape) -> Iterator[Problem]:
    """Find unknown layers and ranks above the size of a weight."""
    lora, layers, key = config.lora, shape.linear_layers, "lora.target_modules"
    if lora is None:
        return
    names, known = lora.target_modules, f"Use some of {', '.join(layers)}"
    if not names:
        why, remedy = "otherwise nothing is trained", f"{known}, or set lora=none"
        yield Problem("adapted_layers", key, [], "at least one linear layer", why, remedy)
    unknown = [name for name in names if name not in layers]
    for name in unknown:
        near = difflib.get_close_matches(name, layers, n=1)
        remedy = f"Did you mean {near[0]}? {known}" if near else known
        why = not_adapted(shape.kind, name) or f"{name} is not a linear layer of the decoder"
        yield Problem("adapted_layers", key, names, "linear layers", why, remedy)
    if unknown or not names:
        return
    smallest, name = min((min(layers[name]), name) for name in names)
    if lora.rank > smallest:
        expected = f"at most {smallest}, the smaller dimension of {name}"
        why = "a higher rank adds parameters without effect"
        remedy = f"Set lora.rank={smallest}, or remove {name} from {key}"
        yield Problem("adapter_rank", "lora.rank", lora.rank, expected, why, remedy)
