"""Checks of sizes against each other: ranks, shards, batches, lengths, parallelism."""

import math
from collections.abc import Iterator

from hybridrl.config.choices import IN_PARTS, ON_OWN_RANKS
from hybridrl.config.errors import Problem, must_be
from hybridrl.config.estimators import trains_reward_model, uses_critic
from hybridrl.config.planner.memory import MIB, token_cache_bytes
from hybridrl.config.planner.shape import ModelShape
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
from hybridrl.config.schema import RolloutConfig, RunConfig

# vLLM pads the vocabulary to a multiple of this before it is split.
VOCAB_PADDING = 64
TP = "rollout.tensor_parallel_size"


def mesh_problems(config: RunConfig) -> Iterator[Problem]:
    """Check dp_replicate * dp_shard against the number of ranks that train."""
    world, fsdp, key = training_ranks(config), config.fsdp, "placement.rollout_gpus"
    if world < 1:
        expected = f"below {world_size(config)} of {world_text(config)}"
        why, remedy = "no rank is left to train", f"Lower {key}, or raise cluster.gpus_per_node"
        yield Problem("no_training_rank", key, config.placement.rollout_gpus, expected, why, remedy)
    elif fsdp.dp_replicate * fsdp.shards != world:
        expected = f"{training_text(config)} with fsdp.dp_replicate = {fsdp.dp_replicate}"
        why, remedy = "every rank holds one shard", "Set fsdp.dp_shard=null, or change cluster.*"
        yield Problem("mesh", "fsdp.dp_shard", fsdp.dp_shard, expected, why, remedy)


def uneven_problems(config: RunConfig) -> Iterator[Problem]:
    """Check that placement.slots_on_nodes has an entry for each node."""
    slots, nodes = config.placement.slots_on_nodes, config.cluster.nodes
    if slots is not None and len(slots) != nodes:
        expected = f"a number for each of cluster.nodes = {nodes}"
        remedy = f"Set cluster.nodes={max(1, len(slots))}"
        yield Problem("slots", "placement.slots_on_nodes", slots, expected, "", remedy)


def port_problems(config: RunConfig) -> Iterator[Problem]:
    """Check that cluster.rendezvous_ports are a first and a last port."""
    ports, key = config.cluster.rendezvous_ports, "cluster.rendezvous_ports"
    if len(ports) != 2 or ports[0] > ports[1]:
        expected = "the first and the last port of a range"
        yield Problem("ports", key, ports, expected, "", f"Set {key}=[29500,29599]")


def engine_problems(config: RunConfig) -> Iterator[Problem]:
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
        remedy = f"Set it to one of {listed(divisors(ranks))}{more}"
        why = "an engine lies on one node"
        yield Problem("engine_ranks", TP, tp, f"a divisor of {where}", why, remedy)


def prompt_problems(config: RunConfig) -> Iterator[Problem]:
    """Check that every engine gets a prompt."""
    key, prompts, engines = (
        "data.prompts_per_step",
        config.data.prompts_per_step,
        num_engines(config),
    )
    if prompts < engines:
        tp = config.rollout.tensor_parallel_size
        why = (
            f"each of the {engines} engines ({sampling_text(config)} / {TP} = {tp}) needs a prompt"
        )
        remedy = f"Set {key}={engines} or more"
        yield Problem("prompts", key, prompts, f"at least {engines}", why, remedy)


def step_responses(config: RunConfig) -> int:
    """Return the responses of a step."""
    return config.data.prompts_per_step * config.rollout.responses_per_prompt


def steps_in_flight(rollout: RolloutConfig) -> int:
    """Return the steps whose prompts may be in flight at once."""
    if rollout.schedule not in IN_PARTS:
        return 1
    # On own ranks, the first step in which a token can be trained is an update later.
    return max(1, rollout.max_versions + (rollout.schedule not in ON_OWN_RANKS))


def fitting_mini_batches(config: RunConfig) -> list[int]:
    """Return the mini-batches that divide a step's responses, and over ranks or their groups."""
    return [n for n in divisors(step_responses(config)) if n % data_shards(config) == 0]


def mini_batch_problems(config: RunConfig) -> Iterator[Problem]:
    """Check that responses divide into mini-batches, and these over ranks or their groups."""
    prompts, each = config.data.prompts_per_step, config.rollout.responses_per_prompt
    mini, shards, size = config.actor.mini_batch_size, data_shards(config), config.fsdp.ulysses_size
    fitting, ranks, key = (
        fitting_mini_batches(config),
        training_text(config),
        "actor.mini_batch_size",
    )
    over = ranks if size == 1 else f"{shards} groups of fsdp.ulysses_size = {size} of {ranks}"
    why = f"each of the {over} computes the same number of responses"
    responses = (
        f"the {prompts * each} responses of a step (data.prompts_per_step = {prompts} x "
        f"rollout.responses_per_prompt = {each})"
    )
    if isinstance(mini, float) and mini <= 1:  # a share that no size fits
        least = shards // math.gcd(shards, each)
        remedy = f"Set data.prompts_per_step to a multiple of {least}"
        yield Problem("mini_batch_share", key, mini, f"a share of {responses}", why, remedy)
        return
    if prompts * each % mini or isinstance(mini, float):
        sizes = listed(fitting or divisors(prompts * each))
        even = "every optimizer step needs the same whole number, or a share of at most 1.0"
        remedy = f"Set {key} to one of {sizes}, or to a share such as 0.5"
        yield Problem("mini_batch", key, mini, f"a divisor of {responses}", even, remedy)
    if mini % shards:
        remedy = f"one of {listed(fitting)}" if fitting else f"a multiple of {shards}"
        expected = f"a multiple of {shards}"
        yield Problem("mini_batch_ranks", key, mini, expected, why, f"Set {key} to {remedy}")


def sequence_problems(config: RunConfig) -> Iterator[Problem]:
    """Check that whole sequence-parallel groups share a copy of the weights."""
    size, dp_shard, key = config.fsdp.ulysses_size, config.fsdp.shards, "fsdp.ulysses_size"
    if dp_shard % size:
        expected = f"a divisor of fsdp.dp_shard = {dp_shard}"
        why = "the ranks of a sequence-parallel group hold shards of one copy of the weights"
        remedy = f"Set {key} to one of {listed(divisors(dp_shard))}"
        yield Problem("sequence_ranks", key, size, expected, why, remedy)


def betas_problems(config: RunConfig) -> Iterator[Problem]:
    """Check that AdamW has its two decay rates."""
    for role, optim in (("actor", config.actor.optim), ("critic", config.critic.optim)):
        if len(optim.betas) != 2:
            key, expected = f"{role}.optim.betas", "two numbers, one per moment of AdamW"
            yield Problem("betas", key, optim.betas, expected, "", f"Set {key}=[0.9,0.999]")


def warm_ups(config: RunConfig) -> dict[str, int]:
    """Return the steps of each warm-up by key."""
    steps = {"actor.optim.warmup_steps": config.actor.optim.warmup_steps}
    if uses_critic(config):
        steps["trainer.critic_warmup_steps"] = config.trainer.critic_warmup_steps
        steps["critic.optim.warmup_steps"] = config.critic.optim.warmup_steps
    return steps


def step_problems(config: RunConfig) -> Iterator[Problem]:
    """Check that warm-ups end before the run does, and that it has the steps to profile."""
    total, of_run = config.trainer.total_steps, "trainer.total_steps"
    for key, steps in warm_ups(config).items():
        if steps >= total and steps > 0:
            expected, why = f"less than {of_run} = {total}", "the run would end during the warm-up"
            yield Problem("warm_up", key, steps, expected, why, f"Lower {key} or raise {of_run}")
    steps_to_profile = config.trainer.profile_steps
    if never := listed([step for step in steps_to_profile if step > total]):
        expected, why = f"at most {of_run} = {total}", f"the run has no step {never}"
        remedy, key = f"Remove {never}, or raise {of_run}", "trainer.profile_steps"
        yield Problem("profile_steps", key, steps_to_profile, expected, why, remedy)


def length_problems(
    config: RunConfig, shape: ModelShape, owner: str = "model.path"
) -> Iterator[Problem]:
    """Check the longest sequence against a model's positions."""
    prompt, response = config.rollout.max_prompt_tokens, config.rollout.max_response_tokens
    most = shape.max_positions
    if most is not None and prompt + response > most:
        key, total = "rollout.max_response_tokens", prompt + response
        expected = f"a sum of at most {most} with rollout.max_prompt_tokens = {prompt}"
        why = f"they make {total} tokens, and max_position_embeddings of {owner} is {most}"
        remedy = f"Lower one of them, or set another {owner.split()[0]}"
        yield Problem("positions", key, response, expected, why, remedy)


def tensor_parallel_problems(config: RunConfig, shape: ModelShape) -> Iterator[Problem]:
    """Check that the model divides into tensor-parallel slices."""
    tp = config.rollout.tensor_parallel_size
    if wrong := _undivided_heads(tp, shape) + _undivided_widths(tp, shape):
        fitting = [
            n
            for n in range(1, shape.largest_attention.heads + 1)
            if not _undivided_heads(n, shape) + _undivided_widths(n, shape)
        ]
        expected = f"a divisor of the model's {', '.join(wrong)}"
        why = "the ranks of an engine hold slices of equal size"
        remedy = f"Set {TP} to one of {listed(fitting)}"
        yield Problem("slices", TP, tp, expected, why, remedy)


def cache_problems(config: RunConfig, shape: ModelShape) -> Iterator[Problem]:
    """Check that the KV cache holds a sequence; layers with a sliding window need less."""
    rollout, key = config.rollout, "rollout.kv_cache_mb"
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    needed = -(-longest * token_cache_bytes(config, shape) // MIB)
    if rollout.kv_cache_mb is not None and rollout.kv_cache_mb < needed and not shape.windowed:
        why = (
            f"that much one sequence of {longest:,} tokens takes (rollout.max_prompt_tokens + "
            f"max_response_tokens)"
        )
        remedy = "Raise it, or lower these"
        yield Problem("cache", key, rollout.kv_cache_mb, f"at least {needed}", why, remedy)


def sequence_head_problems(
    config: RunConfig, shape: ModelShape, owner: str = "model.path"
) -> Iterator[Problem]:
    """Check that attention heads divide over the ranks of a sequence-parallel group."""
    size, dp_shard, key = config.fsdp.ulysses_size, config.fsdp.shards, "fsdp.ulysses_size"
    if wrong := _undivided_heads(size, shape):
        fitting = [n for n in divisors(dp_shard) if not _undivided_heads(n, shape)]
        expected = f"a divisor of the {', '.join(wrong)} of {owner}"
        why = "in attention each rank of a sequence-parallel group computes the same number"
        remedy = f"Set {key} to one of {listed(fitting)}"
        yield Problem("sequence_heads", key, size, expected, why, remedy)


def _undivided_heads(size: int, shape: ModelShape) -> list[str]:
    undivided = []
    for heads, kv_heads, *_ in shape.attentions:
        undivided += [] if heads % size == 0 else [f"{heads} attention heads"]
        if kv_heads % size and size % kv_heads:
            undivided.append(f"{kv_heads} KV heads (nor the other way round)")
    return [*dict.fromkeys(undivided)]


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


def vision_problems(config: RunConfig, shape: ModelShape) -> Iterator[Problem]:
    """Find a tower that is not there or frozen under adapters, and shared sequences."""
    key, size = "actor.train_vision", config.fsdp.ulysses_size
    if shape.takes_images and size > 1:
        why = "images of model.path have positions and states of whole sequences"
        yield must_be("images_of_parts", "fsdp.ulysses_size", size, 1, why)
    if config.actor.train_vision and not shape.takes_images:
        yield must_be("no_tower", key, True, "false", "model.path takes no images")
    elif config.actor.train_vision and trains_reward_model(config):
        why = "a reward model is trained, whose tower is frozen"
        yield must_be("tower_of_rewards", key, True, "false", why)
    elif config.actor.train_vision and config.lora is not None:
        why = "with lora only adapters are trained, of the language model's layers"
        yield must_be("tower_under_lora", key, True, "false", why)
