"""The resolved plan of a run as tables: placement, roles, batches, memory."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from hybridrl.config.choices import Accelerator, Init, Layout
from hybridrl.config.data_schema import DataConfig
from hybridrl.config.estimators import uses_critic
from hybridrl.config.planner.machine import Machine
from hybridrl.config.planner.memory import (
    gib,
    host_parts,
    listed_parts,
    node_peak,
    node_ram,
    rank_phases,
)
from hybridrl.config.planner.model_shape import ModelShape
from hybridrl.config.planner.shard_order import is_nested, ranks_by_shard
from hybridrl.config.planner.world import data_shards, slots_on_nodes, world_size, world_text
from hybridrl.config.schema import RunConfig

# More ranks than this are listed node by node.
MAX_RANKS_LISTED = 32


def plan(
    config: RunConfig, shape: ModelShape, machine: Machine, reward_shape: ModelShape | None = None
) -> RenderableType:
    """Return the output of `run.dry=true`; `reward_shape` is the reward model's, if there is "
    "one."""
    return Group(
        _heading(config, shape, machine, reward_shape),
        _placement(config, machine),
        _roles(config),
        _batches(config),
        _memory(config, shape, machine, reward_shape),
        *_remarks(config, machine),
    )


def _heading(
    config: RunConfig, shape: ModelShape, machine: Machine, reward_shape: ModelShape | None
) -> Table:
    table = _facts("Run")
    table.add_row("name", escape(config.run.name))
    table.add_row("hardware", f"{config.hardware.accelerator}: {escape(config.hardware.reason)}")
    table.add_row("machine", machine.describe())
    table.add_row(
        "model",
        f"{escape(config.model.path)}: {shape.kind}, {shape.parameters:,} parameters, "
        f"{shape.layers} layers, hidden {shape.hidden}, {shape.heads} heads, "
        f"{shape.kv_heads} KV heads, "
        f"vocabulary {shape.vocab:,}{', tied' if shape.tied else ''}",
    )
    if config.model.init is Init.random:
        table.add_row("weights", f"random, from model.seed = {config.model.seed}")
    if reward_shape is not None:
        reward = config.reward_model
        table.add_row(
            "reward model",
            f"{escape(reward.model.path)}: {reward_shape.kind}, "
            f"{reward_shape.backbone_parameters + reward_shape.hidden:,} parameters, "
            f"weight {reward.weight:g}",
        )
    table.add_row("data", escape(_data(config.data)))
    table.add_row(
        "dtypes",
        f"train {config.fsdp.param_dtype}, reduce {config.fsdp.reduce_dtype}, "
        f"rollout {config.rollout.dtype}, master weights float32",
    )
    return table


def _data(data: DataConfig) -> str:
    """Return the source of the problems; of a mixture, each data set's source and weight."""
    if not data.mixture:
        return str(data.train_files or data.name)
    return ", ".join(
        f"{name} (weight {part.weight:g}): {part.train_files or part.name}"
        for name, part in data.mixture.items()
    )


def _placement(config: RunConfig, machine: Machine) -> RenderableType:
    """Return the ranks in order of (node, slot), with their copy and shard of the weights."""
    fsdp, tp = config.fsdp, config.rollout.tensor_parallel_size
    assert fsdp.dp_shard is not None
    device = "GPU" if config.hardware.accelerator is Accelerator.gpu else "CPU slot"
    title = (
        f"Placement: {world_text(config)}; mesh dp_replicate {fsdp.dp_replicate} x dp_shard "
        f"{fsdp.dp_shard}; vLLM engines {world_size(config) // tp} x tensor_parallel_size {tp}"
    )
    table = Table()
    for name in ("rank", "node", device, "dp_replicate", "dp_shard", "engine", "tp"):
        table.add_column(name, justify="right")
    names = node_names(config, machine)
    world = world_size(config)
    order = ranks_by_shard(fsdp)
    single = world <= MAX_RANKS_LISTED
    for node, ranks, slot in _rows(slots_on_nodes(config), single):
        first, last = ranks[0], ranks[-1]
        table.add_row(
            _span(first, last),
            names[node],
            _span(slot, slot + len(ranks) - 1),
            _span(first // fsdp.dp_shard, last // fsdp.dp_shard),
            str(order.index(first % fsdp.dp_shard)) if single else f"0..{fsdp.dp_shard - 1}",
            _span(first // tp, last // tp),
            str(first % tp) if single else f"0..{tp - 1}",
        )
    return Group(title, table)


def _rows(slots_on_nodes: list[int], single: bool) -> Iterator[tuple[int, range, int]]:
    """Yield (node, its ranks, first slot) of each line: one rank, or all of a node."""
    rank = 0
    for node, count in enumerate(slots_on_nodes):
        size = 1 if single else count
        for slot in range(0, count, size):
            yield node, range(rank + slot, rank + slot + size), slot
        rank += count


def node_names(config: RunConfig, machine: Machine) -> list[str]:
    """Return the names of the run's nodes: the machine's if known, else node <n>."""
    known = sorted(node.name for node in machine.nodes)
    wanted = config.cluster.nodes
    return known if len(known) == wanted else [f"node {index}" for index in range(wanted)]


def _roles(config: RunConfig) -> Table:
    fsdp, tp = config.fsdp, config.rollout.tensor_parallel_size
    share = f"1/{fsdp.dp_shard} of the float32 weights"
    table = Table(title="Every rank holds", title_justify="left")
    for name in ("role", "worker", "holds"):
        table.add_column(name)
    table.add_row("rollout", config.rollout.worker, f"1/{tp} of the {config.rollout.dtype} weights")
    trained = "their" if config.lora is None else f"adapters of rank {config.lora.rank}, their"
    holds = f"{share}, {trained} gradients and AdamW's moments"
    table.add_row("actor", config.actor.worker, holds)
    if uses_critic(config):
        holds = f"{share}, their gradients and AdamW's moments"
        table.add_row("critic", config.critic.worker, holds)
    else:
        advantage = config.algorithm.advantage
        table.add_row("critic", "-", f"nothing: algorithm.advantage = {advantage} needs none")
    if config.algorithm.kl.coef > 0:
        shared = config.lora is not None
        holds = "nothing more: the actor's weights without adapters" if shared else share
        table.add_row("ref", config.ref.worker, holds)
    else:
        table.add_row("ref", "-", "nothing: algorithm.kl.coef = 0 disables it")
    if config.reward_model is not None:
        table.add_row("reward_model", config.reward_model.worker, f"{share}, of its own model")
    return table


def _batches(config: RunConfig) -> Table:
    actor, rollout, data = config.actor, config.rollout, config.data
    world = world_size(config)
    engines = world // rollout.tensor_parallel_size
    responses = data.prompts_per_step * rollout.responses_per_prompt
    minis = responses // actor.mini_batch_size
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    shards, sharing = data_shards(config), config.fsdp.ulysses_size
    each = actor.mini_batch_size // shards
    steps = config.trainer.total_steps
    table = _facts("Batches")
    table.add_row(
        "responses a step",
        f"{data.prompts_per_step} prompts x {rollout.responses_per_prompt} = {responses}; "
        f"{-(-data.prompts_per_step // engines)} prompts at most on each of {engines} engines",
    )
    table.add_row(
        "optimizer steps a step",
        f"{actor.epochs} epochs x {minis} mini-batches of {actor.mini_batch_size} = "
        f"{actor.epochs * minis}{' (actor and critic each)' if uses_critic(config) else ''}",
    )
    table.add_row(
        "a rank's mini-batch" if sharing == 1 else f"mini-batch of {sharing} ranks together",
        f"{actor.mini_batch_size} / {shards} = {each} responses, at most {each * longest:,} "
        f"tokens, in micro-batches of at most {actor.max_tokens_per_gpu * sharing:,} tokens",
    )
    table.add_row(
        "longest sequence",
        f"{rollout.max_prompt_tokens} + {rollout.max_response_tokens} = {longest} tokens",
    )
    table.add_row(
        "whole run",
        f"{steps} steps, {steps * responses:,} responses, "
        f"{steps * actor.epochs * minis:,} optimizer steps",
    )
    return table


def _memory(
    config: RunConfig, shape: ModelShape, machine: Machine, reward_shape: ModelShape | None
) -> RenderableType:
    on_gpu = config.hardware.accelerator is Accelerator.gpu
    gpu_bytes = min((gpu.memory_bytes for gpu in machine.gpus), default=0) if on_gpu else None
    phases = rank_phases(config, shape, gpu_bytes, reward_shape)
    if not on_gpu:
        there = min(node.memory_bytes for node in machine.nodes)
        known = f"at least; {gib(node_peak(config, phases))} on a node with the driver"
        limit = f"{known}; it has {gib(there)}"
    else:
        limit = "predicted; " + (f"a GPU has {gib(gpu_bytes)}" if gpu_bytes else "GPU unknown")
    title = f"Memory of one rank by phase ({limit}); without parts below 1 %"
    table = Table()
    for name in ("phase", "total", "of which"):
        table.add_column(name)
    for phase in phases:
        table.add_row(phase.name, gib(phase.total), listed_parts(phase.parts))
    return Group(title, table, *_host(config, shape, machine, reward_shape))


def _host(
    config: RunConfig, shape: ModelShape, machine: Machine, reward_shape: ModelShape | None
) -> list[str]:
    """Describe the host memory of ranks with GPUs."""
    if not machine.gpus:
        return []
    parts = host_parts(config, shape, reward_shape)
    needed = gib(node_ram(config, shape, reward_shape))
    there = gib(min(node.memory_bytes for node in machine.nodes))
    return [
        f"Host memory of one rank: {gib(sum(parts.values()))} ({listed_parts(parts)}); {needed} on "
        f"a node with the driver; it has {there}."
    ]


def _remarks(config: RunConfig, machine: Machine) -> list[str]:
    """Return notes on allowed but notable settings."""
    remarks = []
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    fsdp, tp = config.fsdp, config.rollout.tensor_parallel_size
    share = -(-longest // fsdp.ulysses_size)
    if config.actor.max_tokens_per_gpu < share:
        remarks.append(
            f"Note: actor.max_tokens_per_gpu = {config.actor.max_tokens_per_gpu} is less than the "
            f"longest sequence ({longest}{f' / {fsdp.ulysses_size}' if share < longest else ''}); "
            f"such a sequence is a micro-batch of its own."
        )
    if any(slots % fsdp.ulysses_size for slots in slots_on_nodes(config)):
        remarks.append(
            f"Note: fsdp.ulysses_size = {fsdp.ulysses_size} does not divide the ranks of each node "
            f"({world_text(config)}): sequence-parallel groups span several nodes and exchange "
            f"every layer's activations between them."
        )
    if fsdp.layout is Layout.aligned and tp > 1 and not is_nested(fsdp):
        remarks.append(
            f"Note: rollout.tensor_parallel_size = {tp} does not divide fsdp.dp_shard = "
            f"{fsdp.dp_shard}: shards lie outside of their ranks' slices, so weight syncs move "
            f"more."
        )
    if config.hardware.accelerator is Accelerator.gpu and not machine.gpus:
        remarks.append("Note: this machine has no GPU; GPU memory was not checked.")
    return [*remarks, "Dry run: nothing was started. Remove run.dry=true to train."]


def _facts(title: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column("what")
    table.add_column("value")
    return table


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}..{last}"
