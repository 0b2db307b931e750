"""Checks of sizes against each other: ranks, shards, batches, lengths, parallelism."""

import math
from collections.abc import Iterator
from operator import attrgetter

from hybridrl.config.estimators import is_supervised, uses_critic
from hybridrl.config.planner.memory import MIB, token_cache_bytes
from hybridrl.config.planner.model_shape import ModelShape
from hybridrl.config.planner.world import (
    data_shards,
    engine_ranks,
    num_engines,
    sampling_ranks,
    sampling_slots_on_nodes,
    sampling_text,
    training_ranks,
    training_text,
    world_size,
    world_text,
)
from hybridrl.config.schema import RunConfig

# vLLM pads the vocabulary to a multiple of this before it is split.
VOCAB_PADDING = 64
_DISTRIBUTION = "log-probs must be of the sampled distribution"
# Keys, the keys that they link to by default, and why they must not differ.
LINKED = (
    ("actor.temperature", "rollout.temperature", _DISTRIBUTION),
    ("ref.temperature", "rollout.temperature", _DISTRIBUTION),
    ("actor.router_replay", "rollout.router_replay", "it uses the experts that vLLM records"),
    (
        "fsdp.tensor_parallel_size",
        "rollout.tensor_parallel_size",
        "with other slices than vLLM's every weight sync is slower",
    ),
)


def mesh_problems(config: RunConfig) -> Iterator[str]:
    """Check dp_replicate * dp_shard against the number of ranks that train."""
    world, fsdp = training_ranks(config), config.fsdp
    if world < 1:
        yield (
            f"placement.rollout_gpus = {config.placement.rollout_gpus} of {world_text(config)}: "
            f"no rank is left to train.\n"
            f"Set placement.rollout_gpus below {world_size(config)}, or more cluster.gpus_per_node."
        )
    elif fsdp.dp_replicate * fsdp.shards != world:
        yield (
            f"fsdp.dp_replicate = {fsdp.dp_replicate} x fsdp.dp_shard = {fsdp.dp_shard} make "
            f"{fsdp.dp_replicate * fsdp.shards}, expected the {training_text(config)}: every rank "
            f"holds one shard.\n"
            f"Set fsdp.dp_shard=null to derive it, or change cluster.*."
        )


def uneven_problems(config: RunConfig) -> Iterator[str]:
    """Check that placement.slots_on_nodes has an entry for each node."""
    slots, nodes = config.placement.slots_on_nodes, config.cluster.nodes
    if slots is not None and len(slots) != nodes:
        yield (
            f"placement.slots_on_nodes = {slots} names {len(slots)} node(s), but cluster.nodes = "
            f"{nodes}.\nSet cluster.nodes={max(1, len(slots))}."
        )


def engine_problems(config: RunConfig) -> Iterator[str]:
    """Check that vLLM engines fit onto each node, or with allow_straddle onto all together."""
    tp, placement = config.rollout.tensor_parallel_size, config.placement
    ranks = next((n for n in sampling_slots_on_nodes(config) if n % tp), tp)
    where, more = f"cluster.gpus_per_node = {ranks}", f", multiples of {tp} ranks on each node"
    if placement.slots_on_nodes is not None:
        where = f"{ranks} of placement.slots_on_nodes = {placement.slots_on_nodes}"
    if engine_ranks(config):
        where = f"{ranks} of the placement.rollout_gpus = {engine_ranks(config)} on a node"
        more = ""
    if placement.allow_straddle:
        ranks, where = sampling_ranks(config), sampling_text(config)
    else:
        more += ", or placement.allow_straddle=true, which is slow"
    if ranks % tp:
        yield (
            f"rollout.tensor_parallel_size = {tp} does not divide {where}: an engine lies on one "
            f"node.\nSet it to one of {listed(divisors(ranks))}{more}."
        )


def link_problems(config: RunConfig) -> Iterator[str]:
    """Check that keys have the value of the key that they link to."""
    for key, target, why in LINKED:
        found, expected = attrgetter(key, target)(config)
        if target == "rollout.temperature" and is_supervised(config):
            continue  # it samples only for evaluation
        if found != expected:
            yield (
                f"{key} = {found}, expected {target} = {expected}, its default: {why}.\n"
                f"Remove {key}, and set {target} instead."
            )


def prompt_problems(config: RunConfig) -> Iterator[str]:
    """Check that every engine gets a prompt."""
    tp, prompts = config.rollout.tensor_parallel_size, config.data.prompts_per_step
    engines = num_engines(config)
    if prompts < engines:
        yield (
            f"data.prompts_per_step = {prompts}, expected at least {engines}: each of the "
            f"{engines} engines ({sampling_text(config)} / rollout.tensor_parallel_size = {tp}) "
            f"needs a prompt.\n"
            f"Set data.prompts_per_step={engines} or more."
        )


def step_responses(config: RunConfig) -> int:
    """Return the responses of a step."""
    prompts: int = config.data.prompts_per_step
    return prompts * int(config.rollout.responses_per_prompt)


def fitting_mini_batches(config: RunConfig) -> list[int]:
    """Return the mini-batches that divide a step's responses, and over ranks or their groups."""
    return [n for n in divisors(step_responses(config)) if n % data_shards(config) == 0]


def mini_batch_problems(config: RunConfig) -> Iterator[str]:
    """Check that responses divide into mini-batches, and these over ranks or their groups."""
    prompts, each = config.data.prompts_per_step, config.rollout.responses_per_prompt
    mini, shards, size = config.actor.mini_batch_size, data_shards(config), config.fsdp.ulysses_size
    fitting, ranks = fitting_mini_batches(config), training_text(config)
    over = ranks if size == 1 else f"{shards} groups of fsdp.ulysses_size = {size} of {ranks}"
    responses = (
        f"{prompts * each} responses of a step (data.prompts_per_step = {prompts} x "
        f"rollout.responses_per_prompt = {each})"
    )
    sizes = f"one of {listed(fitting or divisors(prompts * each))}, or to a share such as 0.5"
    if isinstance(mini, float) and mini <= 1:  # a share that no size fits
        yield (
            f"actor.mini_batch_size = {mini} is a share of the {responses}, none of whose divisors "
            f"divides over {over}, each of which computes the same number of responses.\n"
            f"Set data.prompts_per_step to a multiple of {shards // math.gcd(shards, each)}."
        )
        return
    if prompts * each % mini or isinstance(mini, float):
        yield (
            f"actor.mini_batch_size = {mini} does not divide the {responses}: every optimizer step "
            f"needs the same whole number, or a share of at most 1.0.\n"
            f"Set actor.mini_batch_size to {sizes}."
        )
    if mini % shards:
        remedy = f"one of {listed(fitting)}" if fitting else f"a multiple of {shards}"
        yield (
            f"actor.mini_batch_size = {mini} does not divide over {over}, each of which computes "
            f"the same number of responses.\nSet actor.mini_batch_size to {remedy}."
        )


def sequence_problems(config: RunConfig) -> Iterator[str]:
    """Check that whole sequence-parallel groups share a copy of the weights."""
    size, dp_shard = config.fsdp.ulysses_size, config.fsdp.shards
    if dp_shard % size:
        yield (
            f"fsdp.ulysses_size = {size} does not divide fsdp.dp_shard = {dp_shard}: the ranks of "
            f"a sequence-parallel group hold shards of one copy of the weights.\n"
            f"Set fsdp.ulysses_size to one of {listed(divisors(dp_shard))}."
        )


def port_problems(config: RunConfig) -> Iterator[str]:
    """Check that cluster.rendezvous_ports are a first and a last port."""
    ports = config.cluster.rendezvous_ports
    if len(ports) != 2 or ports[0] > ports[1]:
        yield (
            f"cluster.rendezvous_ports = {ports}, expected the first and the last port of a "
            f"range.\n"
            "Set cluster.rendezvous_ports=[29500,29599]."
        )


def betas_problems(config: RunConfig) -> Iterator[str]:
    """Check that AdamW has its two decay rates."""
    for role, optim in (("actor", config.actor.optim), ("critic", config.critic.optim)):
        if optim.betas is not None and len(optim.betas) != 2:
            yield (
                f"{role}.optim.betas = {optim.betas}, expected two numbers, one per moment of "
                f"AdamW.\nSet {role}.optim.betas=[0.9,0.999]."
            )


def warm_ups(config: RunConfig) -> dict[str, int]:
    """Return the steps of each warm-up by key."""
    found = {"actor.optim.warmup_steps": config.actor.optim.warmup_steps}
    if uses_critic(config):
        found["trainer.critic_warmup_steps"] = config.trainer.critic_warmup_steps
        found["critic.optim.warmup_steps"] = config.critic.optim.warmup_steps
    return found


def step_problems(config: RunConfig) -> Iterator[str]:
    """Check that warm-ups end before the run does, and that it has the steps to profile."""
    total = config.trainer.total_steps
    for key, steps in warm_ups(config).items():
        if steps >= total and steps > 0:
            yield (
                f"{key} = {steps}, expected less than trainer.total_steps = {total}: the run would "
                f"end during the warm-up.\n"
                f"Lower {key} or raise trainer.total_steps."
            )
    never = [step for step in config.trainer.profile_steps if step > total]
    if never:
        yield (
            f"trainer.profile_steps = {config.trainer.profile_steps}, expected at most "
            f"trainer.total_steps = {total}: the run has no step {listed(never)}.\n"
            f"Remove {listed(never)}, or raise trainer.total_steps."
        )


def length_problems(
    config: RunConfig, shape: ModelShape, owner: str = "model.path"
) -> Iterator[str]:
    """Check the longest sequence against a model's positions."""
    rollout = config.rollout
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    if shape.max_positions is not None and longest > shape.max_positions:
        yield (
            f"rollout.max_prompt_tokens = {rollout.max_prompt_tokens} + "
            f"rollout.max_response_tokens = {rollout.max_response_tokens} make {longest} tokens, "
            f"expected at most {shape.max_positions}, max_position_embeddings of {owner}.\n"
            f"Lower one of them, or set another {owner.split()[0]}."
        )


def tensor_parallel_problems(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    """Check that the model divides into tensor-parallel slices."""
    tp = config.rollout.tensor_parallel_size
    if wrong := _undivided_heads(tp, shape) + _undivided_widths(tp, shape):
        fitting = [
            n
            for n in range(1, shape.heads + 1)
            if not _undivided_heads(n, shape) + _undivided_widths(n, shape)
        ]
        yield (
            f"rollout.tensor_parallel_size = {tp} does not divide the model's "
            f"{', '.join(wrong)}: the ranks of an engine hold slices of equal size.\n"
            f"Set rollout.tensor_parallel_size to one of {listed(fitting)}."
        )


def cache_problems(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    """Check that the KV cache holds a sequence; layers with a sliding window need less."""
    rollout = config.rollout
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    needed = -(-longest * token_cache_bytes(config, shape) // MIB)
    if rollout.kv_cache_mb is not None and rollout.kv_cache_mb < needed and not shape.windowed:
        yield (
            f"rollout.kv_cache_mb = {rollout.kv_cache_mb}, expected at least {needed}: that much "
            f"one sequence of {longest:,} tokens takes (rollout.max_prompt_tokens + "
            f"max_response_tokens).\nRaise it, or lower these."
        )


def sequence_head_problems(
    config: RunConfig, shape: ModelShape, owner: str = "model.path"
) -> Iterator[str]:
    """Check that attention heads divide over the ranks of a sequence-parallel group."""
    size, dp_shard = config.fsdp.ulysses_size, config.fsdp.shards
    if wrong := _undivided_heads(size, shape):
        fitting = [n for n in divisors(dp_shard) if not _undivided_heads(n, shape)]
        yield (
            f"fsdp.ulysses_size = {size} does not divide the {', '.join(wrong)} of {owner}: in "
            f"attention each rank of a sequence-parallel group computes the same number.\n"
            f"Set fsdp.ulysses_size to one of {listed(fitting)}."
        )


def _undivided_heads(size: int, shape: ModelShape) -> list[str]:
    found = [] if shape.heads % size == 0 else [f"{shape.heads} attention heads"]
    if shape.kv_heads % size and size % shape.kv_heads:
        found.append(f"{shape.kv_heads} KV heads (nor the other way round)")
    return found


def _undivided_widths(tp: int, shape: ModelShape) -> list[str]:
    padded = -(-shape.vocab // VOCAB_PADDING) * VOCAB_PADDING
    widths = {
        **{f"{name} {width}": width for name, width in shape.tp_widths.items()},
        f"vocabulary of {shape.vocab} (padded to {padded})": padded,
    }
    return [text for text, width in widths.items() if width % tp]


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number in ascending order."""
    lower = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*lower, *(number // n for n in lower)})


def listed(numbers: list[int]) -> str:
    """Return '1, 2, 4'."""
    return ", ".join(map(str, numbers))
