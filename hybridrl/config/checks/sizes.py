"""Checks of sizes against each other: ranks, shards, batches, lengths, tensor parallelism."""

from collections.abc import Iterator

from hybridrl.config.estimators import uses_critic
from hybridrl.config.planner.model_shape import ModelShape
from hybridrl.config.planner.world import data_shards, world_size, world_text
from hybridrl.config.schema import RunConfig

# vLLM pads the vocabulary to a multiple of this before it is split.
VOCAB_PADDING = 64


def mesh_problems(config: RunConfig) -> Iterator[str]:
    """Check dp_replicate * dp_shard against the number of ranks."""
    world, fsdp = world_size(config), config.fsdp
    if fsdp.dp_shard is None:
        if world % fsdp.dp_replicate:
            yield (
                f"fsdp.dp_replicate = {fsdp.dp_replicate} does not divide the "
                f"{world_text(config)}: every copy needs the same number of ranks.\n"
                f"Set fsdp.dp_replicate to one of {listed(divisors(world))}."
            )
    elif fsdp.dp_replicate * fsdp.dp_shard != world:
        yield (
            f"fsdp.dp_replicate = {fsdp.dp_replicate} x fsdp.dp_shard = {fsdp.dp_shard} make "
            f"{fsdp.dp_replicate * fsdp.dp_shard}, expected the {world_text(config)}: every rank "
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
    tp, per_node = config.rollout.tensor_parallel_size, config.cluster.gpus_per_node
    if config.placement.allow_straddle:
        if world_size(config) % tp:
            yield (
                f"rollout.tensor_parallel_size = {tp} does not divide {world_text(config)}.\n"
                f"Set it to one of {listed(divisors(world_size(config)))}."
            )
        return
    if config.placement.slots_on_nodes is not None:
        uneven = [slots for slots in config.placement.slots_on_nodes if slots % tp]
        if uneven:
            yield (
                f"rollout.tensor_parallel_size = {tp} does not divide {uneven[0]} of "
                f"placement.slots_on_nodes = {config.placement.slots_on_nodes}: the ranks of an "
                f"engine must be on one node.\n"
                f"Use multiples of {tp}, with idle GPUs, or set placement.allow_straddle=true, "
                f"which is slow."
            )
        return
    assert per_node is not None
    if per_node % tp:
        yield (
            f"rollout.tensor_parallel_size = {tp} does not divide cluster.gpus_per_node = "
            f"{per_node}: the ranks of an engine must be on one node.\n"
            f"Set rollout.tensor_parallel_size to one of {listed(divisors(per_node))}, or "
            f"cluster.gpus_per_node to a multiple of {tp}."
        )


def layout_problems(config: RunConfig) -> Iterator[str]:
    """Check that shards are aligned to vLLM's tensor-parallel slices."""
    aligned_to, tp = config.fsdp.tensor_parallel_size, config.rollout.tensor_parallel_size
    if aligned_to != tp:
        yield (
            f"fsdp.tensor_parallel_size = {aligned_to}, expected the link "
            f"${{rollout.tensor_parallel_size}}, which is {tp}: with other "
            f"slices than vLLM's every weight sync is slower.\n"
            f"Remove fsdp.tensor_parallel_size and set rollout.tensor_parallel_size instead."
        )


def prompt_problems(config: RunConfig) -> Iterator[str]:
    """Check that every engine gets a prompt."""
    tp, prompts = config.rollout.tensor_parallel_size, config.data.prompts_per_step
    engines = world_size(config) // tp
    if prompts < engines:
        yield (
            f"data.prompts_per_step = {prompts}, expected at least {engines}: each of the "
            f"{engines} engines ({world_text(config)} / rollout.tensor_parallel_size = {tp}) "
            f"needs a prompt.\n"
            f"Set data.prompts_per_step={engines} or more."
        )


def mini_batch_problems(config: RunConfig) -> Iterator[str]:
    """Check that a step's responses divide into mini-batches."""
    prompts, each = config.data.prompts_per_step, config.rollout.responses_per_prompt
    mini = config.actor.mini_batch_size
    if prompts * each % mini:
        fitting = [n for n in divisors(prompts * each) if n % data_shards(config) == 0]
        yield (
            f"actor.mini_batch_size = {mini} does not divide the {prompts * each} responses of a "
            f"step (data.prompts_per_step = {prompts} x rollout.responses_per_prompt = {each}): "
            f"every optimizer step needs the same number.\n"
            f"Set actor.mini_batch_size to one of {listed(fitting or divisors(prompts * each))}."
        )


def mini_batch_rank_problems(config: RunConfig) -> Iterator[str]:
    """Check that a mini-batch divides over the ranks or sequence-parallel groups."""
    mini, shards, size = config.actor.mini_batch_size, data_shards(config), config.fsdp.ulysses_size
    if mini % shards:
        total = config.data.prompts_per_step * config.rollout.responses_per_prompt
        fitting = [n for n in divisors(total) if n % shards == 0]
        ranks = world_text(config)
        over = ranks if size == 1 else f"{shards} groups of fsdp.ulysses_size = {size} of {ranks}"
        yield (
            f"actor.mini_batch_size = {mini} does not divide over {over}: every "
            f"{'rank' if size == 1 else 'group'} computes the same number of responses.\n"
            f"Set actor.mini_batch_size to "
            + (f"one of {listed(fitting)}." if fitting else f"a multiple of {shards}.")
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
    """Check that warm-ups end before the run does."""
    total = config.trainer.total_steps
    for key, steps in warm_ups(config).items():
        if steps >= total and steps > 0:
            yield (
                f"{key} = {steps}, expected less than trainer.total_steps = {total}: the run would "
                f"end during the warm-up.\n"
                f"Lower {key} or raise trainer.total_steps."
            )


def profile_problems(config: RunConfig) -> Iterator[str]:
    """Check that the run has the steps to profile."""
    total = config.trainer.total_steps
    never = [step for step in config.trainer.profile_steps if step > total]
    if never:
        yield (
            f"trainer.profile_steps = {config.trainer.profile_steps}, expected at most "
            f"trainer.total_steps = {total}: the run has no step {listed(never)}.\n"
            f"Remove {listed(never)}, or raise trainer.total_steps."
        )


def temperature_problems(config: RunConfig) -> Iterator[str]:
    """Check that log-probs have the temperature of sampling."""
    for role, temperature in (("actor", config.actor.temperature), ("ref", config.ref.temperature)):
        if temperature != config.rollout.temperature:
            yield (
                f"{role}.temperature = {temperature}, expected rollout.temperature = "
                f"{config.rollout.temperature}: log-probs must be of the sampled "
                f"distribution.\n"
                f"Remove {role}.temperature, and set only rollout.temperature."
            )


def length_problems(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    """Check the longest sequence against the model's positions."""
    rollout = config.rollout
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    if shape.max_positions is not None and longest > shape.max_positions:
        yield (
            f"rollout.max_prompt_tokens = {rollout.max_prompt_tokens} + "
            f"rollout.max_response_tokens = {rollout.max_response_tokens} make {longest} tokens, "
            f"expected at most {shape.max_positions}, the model's max_position_embeddings.\n"
            f"Lower one of them."
        )


def tensor_parallel_problems(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    """Check that the model divides into tensor-parallel slices."""
    tp = config.rollout.tensor_parallel_size
    padded = -(-shape.vocab // VOCAB_PADDING) * VOCAB_PADDING
    wrong = []
    if shape.heads % tp:
        wrong.append(f"{shape.heads} attention heads")
    if shape.kv_heads % tp and tp % shape.kv_heads:
        wrong.append(f"{shape.kv_heads} KV heads (nor the other way round)")
    if shape.intermediate % tp:
        wrong.append(f"intermediate size {shape.intermediate}")
    if padded % tp:
        wrong.append(f"vocabulary of {shape.vocab} (padded to {padded})")
    if wrong:
        fitting = [n for n in range(1, shape.heads + 1) if _cuts(n, shape, padded)]
        yield (
            f"rollout.tensor_parallel_size = {tp} does not divide the model's "
            f"{', '.join(wrong)}: the ranks of an engine hold slices of equal size.\n"
            f"Set rollout.tensor_parallel_size to one of {listed(fitting)}."
        )


def _cuts(tp: int, shape: ModelShape, padded_vocab: int) -> bool:
    kv = shape.kv_heads % tp == 0 or tp % shape.kv_heads == 0
    return kv and shape.heads % tp == shape.intermediate % tp == padded_vocab % tp == 0


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number in ascending order."""
    return [n for n in range(1, number + 1) if number % n == 0]


def listed(numbers: list[int]) -> str:
    """Return '1, 2, 4'."""
    return ", ".join(map(str, numbers))
