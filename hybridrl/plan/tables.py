"""The resolved plan of a run as tables: placement, roles, batches, memory."""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from hybridrl.config.choices import Accelerator, Init, Layout
from hybridrl.config.estimators import is_supervised, uses_critic
from hybridrl.config.planner.machine import UNKNOWN_RAM, Machine
from hybridrl.config.planner.memory import (
    gib,
    host_parts,
    largest,
    listed_parts,
    rank_phases,
    tightest_node,
)
from hybridrl.config.planner.shape import Frozen, ModelShape
from hybridrl.config.planner.world import (
    data_shards,
    engine_ranks,
    is_nested,
    num_engines,
    ranks_by_shard,
    rollout_weights,
    sampling_ranks,
    slots_on_nodes,
    training_ranks,
    world_text,
)
from hybridrl.config.policy_losses import targets_of, uses_reference
from hybridrl.config.schema import RunConfig

# Further ranks are left out.
MAX_RANKS_LISTED = 32
# Title of the roles, where all ranks have them, and where some only sample.
HOLDERS = (
    "Every rank holds",
    "The ranks of an engine hold (rollout), with a shadow copy; each other rank (all else)",
)


def plan(
    config: RunConfig,
    shape: ModelShape,
    machine: Machine,
    frozen: Frozen = (),
    inputs: Sequence[tuple[str, str]] = (),
) -> RenderableType:
    """Return the output of `run.dry=true`; `frozen` are reward model and teachers.

    `inputs` are names and values of what is learned from.
    """
    roles = ("role", "worker", "holds")
    return Group(
        table("Run", (), [*_heading(config, shape, machine, frozen), *inputs]),
        *_placement(config, machine),
        table(HOLDERS[engine_ranks(config) > 0], roles, _roles(config)),
        table("Batches", (), _batches(config)),
        *memory_tables(config, shape, machine, frozen),
        *_remarks(config),
    )


def table(title: str | None, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """Return a table; without columns one of names and values."""
    named = list(columns)
    table = Table(title=title, title_justify="left", show_header=bool(named))
    for name in named or ("name", "value"):
        table.add_column(name)
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def _heading(
    config: RunConfig, shape: ModelShape, machine: Machine, frozen: Frozen
) -> Iterator[tuple[str, str]]:
    yield "name", config.run.name
    yield "hardware", f"{config.hardware.accelerator}: {config.hardware.reason}"
    if (about := machine.describe()) not in config.hardware.reason:
        yield "machine", about
    experts = ""
    if shape.experts is not None:
        number, active, *_ = shape.experts
        experts = f"{shape.active_parameters:,} active, {active} of {number} experts, "
    heads, kv_heads, *_ = shape.largest_attention
    yield (
        "model",
        f"{config.model.path}: {shape.kind}, {shape.parameters:,} parameters, {experts}"
        f"{shape.layers} layers, hidden {shape.hidden}, {heads} heads, "
        f"{kv_heads} KV heads, vocabulary {shape.vocab:,}{', tied' if shape.tied else ''}",
    )
    if shape.takes_images:
        vision, how = shape.vision, "trained" if config.actor.train_vision else "frozen"
        patches = f"{vision.merged} patches of {vision.side} x {vision.side} pixels"
        of_these = f"{vision.parameters:,} of these parameters, {how}"
        yield "images", f"{of_these}; {vision.layers} layers, a token for each {patches}"
    if shape.untested:
        yield "untested", shape.untested
    if config.model.init is Init.random:
        yield "weights", f"random, from model.seed = {config.model.seed}"
    for model in frozen:
        yield model.described(f": {model.shape.kind}, {model.parameters:,} parameters")


def _placement(config: RunConfig, machine: Machine) -> tuple[str, Table]:
    """Return the ranks in order of (node, slot), with their copy and shard of the weights."""
    fsdp, tp = config.fsdp, config.rollout.tensor_parallel_size
    device = "GPU" if config.hardware.accelerator is Accelerator.gpu else "CPU slot"
    title = (
        f"Placement: {world_text(config)}; mesh dp_replicate {fsdp.dp_replicate} x dp_shard "
        f"{fsdp.dp_shard}; vLLM engines {num_engines(config)} x tensor_parallel_size {tp}"
    )
    names = [node.name for node in machine.nodes]
    if len(names) != config.cluster.nodes:
        names = [f"node {index}" for index in range(config.cluster.nodes)]
    order = ranks_by_shard(fsdp)
    counts = enumerate(slots_on_nodes(config))
    places = [(names[node], slot) for node, count in counts for slot in range(count)]
    rows = []
    trainers, first = training_ranks(config), len(places) - sampling_ranks(config)
    for rank, (node, slot) in enumerate(places[:MAX_RANKS_LISTED]):
        copy, shard = str(rank // fsdp.shards), str(order.index(rank % fsdp.shards))
        trains = (copy, shard) if rank < trainers else ("", "")
        engine, place = divmod(rank - first, tp)
        samples = (str(engine), str(place)) if rank >= first else ("", "")
        rows.append([str(rank), node, str(slot), *trains, *samples])
    columns = ("rank", "node", device, "dp_replicate", "dp_shard", "engine", "tp")
    if len(places) > len(rows):
        rows.append(["..."] * len(columns))
    return title, table(None, columns, rows)


def _roles(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    tp, lora = config.rollout.tensor_parallel_size, config.lora
    share = f"1/{config.fsdp.dp_shard} of the float32 weights"
    trained = "their" if lora is None else f"adapters of rank {lora.rank}, their"
    worker, holds = "-", f"nothing: algorithm.advantage = {config.algorithm.advantage} needs none"
    if uses_critic(config):
        worker, holds = config.critic.worker, f"{share}, their gradients and AdamW's moments"
    ref, weights = "-", "nothing: algorithm.kl.coef = 0 disables it"
    if uses_reference(config):
        adapted = "nothing more: the actor's weights without adapters"
        ref, weights = config.ref.worker, adapted if lora else share
    yield "rollout", config.rollout.worker, f"1/{tp} of the {rollout_weights(config)} weights"
    yield "actor", config.actor.worker, f"{share}, {trained} gradients and AdamW's moments"
    yield "critic", worker, holds
    yield "ref", ref, weights
    if config.reward_model is not None:
        yield "reward_model", config.reward_model.worker, f"{share}, of its own model"
    if config.teacher is not None:
        models = " and ".join(config.teacher.paths) or "its model"
        yield "teacher", config.teacher.worker, f"{share} of {models}"


def _batches(config: RunConfig) -> Iterator[tuple[str, str]]:
    actor, rollout, prompts = config.actor, config.rollout, config.data.prompts_per_step
    engines = num_engines(config)
    responses = prompts * rollout.responses_per_prompt
    minis = responses // actor.mini_batch_size
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    shards, sharing = data_shards(config), config.fsdp.ulysses_size
    each = actor.mini_batch_size // shards
    steps, epochs = config.trainer.total_steps, config.trainer.epochs
    of_epochs = "" if epochs is None else f" (trainer.epochs = {epochs:g})"
    if is_supervised(config):
        yield f"{targets_of(config)} a step", str(prompts)
    else:
        yield (
            "responses a step",
            f"{prompts} prompts x {rollout.responses_per_prompt} = {responses}; "
            f"{-(-prompts // engines)} prompts at most on each of {engines} engines",
        )
    yield (
        "optimizer steps a step",
        f"{actor.epochs} epochs x {minis} mini-batches of {actor.mini_batch_size} = "
        f"{actor.epochs * minis}{' (actor and critic each)' if uses_critic(config) else ''}",
    )
    yield (
        "a rank's mini-batch" if sharing == 1 else f"mini-batch of {sharing} ranks together",
        f"{actor.mini_batch_size} / {shards} = {each} responses, at most {each * longest:,} "
        f"tokens, in micro-batches of at most {actor.max_tokens_per_gpu * sharing:,} tokens",
    )
    yield (
        "whole run",
        f"{steps} steps{of_epochs}, {steps * responses:,} responses, "
        f"{steps * actor.epochs * minis:,} optimizer steps",
    )


def memory_tables(
    config: RunConfig, shape: ModelShape, machine: Machine, frozen: Frozen
) -> Iterator[RenderableType]:
    """Yield the predicted memory of a GPU or CPU slot by phase, and the RAM of a node."""
    on_gpu, limit, gpu_bytes = config.hardware.accelerator is Accelerator.gpu, "at least", None
    if on_gpu:
        gpu_bytes = min((gpu.memory_bytes for gpu in machine.gpus), default=0)
        limit = f"a GPU has {gib(gpu_bytes)}" if gpu_bytes else "GPU unknown, so not checked"
    phases = rank_phases(config, shape, gpu_bytes, frozen)
    columns = ["phase", "needs", "of which (from 2 %)"]
    rows = [[phase.name, gib(phase.total), listed_parts(phase.parts)] for phase in phases]
    if gpu_bytes:
        columns.insert(2, "fits")
        for row, phase in zip(rows, phases, strict=True):
            row.insert(2, "yes" if phase.total <= gpu_bytes else "no")
    yield table(f"Predicted memory of one rank by phase ({limit})", columns, rows)
    if on_gpu and not gpu_bytes:
        return
    parts = host_parts(config, shape, frozen) if on_gpu else largest(phases).parts
    each = sum(parts.values())
    _, needed, available = tightest_node(config, machine, each)
    has = f"; it has {gib(available)}" if available < UNKNOWN_RAM else ""
    yield (
        f"Host memory of one rank: {gib(each)} ({listed_parts(parts)}); "
        f"{gib(needed)} on a node with the driver{has}."
    )


def _remarks(config: RunConfig) -> Iterator[str]:
    """Yield notes on allowed but notable settings."""
    fsdp, tp = config.fsdp, config.rollout.tensor_parallel_size
    if any(slots % fsdp.ulysses_size for slots in slots_on_nodes(config)):
        yield (
            f"Note: fsdp.ulysses_size = {fsdp.ulysses_size} does not divide the ranks of each node "
            f"({world_text(config)}): sequence-parallel groups exchange every layer's activations "
            f"between nodes."
        )
    if fsdp.layout is Layout.aligned and tp > 1 and not is_nested(fsdp):
        yield (
            f"Note: rollout.tensor_parallel_size = {tp} does not divide fsdp.dp_shard = "
            f"{fsdp.dp_shard}: shards lie outside of their ranks' slices; weight syncs move more."
        )
    if config.run.dry:
        yield "Dry run: nothing was started. Remove run.dry=true to train."
