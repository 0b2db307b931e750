"""Placement and memory stages: room for all ranks, and free memory of nodes and GPUs."""

from collections.abc import Mapping, Sequence

import psutil

from hybridrl.config.planner.memory import (
    CPU_DRIVER_BYTES,
    MIB,
    describe,
    gib,
    host_parts,
    largest,
    on_node,
    pinned_bytes,
    rank_phases,
)
from hybridrl.config.planner.world import sampling_slots_on_nodes, slots_on_nodes
from hybridrl.controller.ray.node_probes import Resources
from hybridrl.doctor.findings import (
    Finding,
    Rule,
    fail,
    fails_if,
    first,
    ok,
    skipped,
    warn,
    warns_if,
)
from hybridrl.doctor.host.facts import Limit, cgroup_facts
from hybridrl.doctor.host.gpus import GPUFacts, gpu_facts
from hybridrl.doctor.stages import CheckContext, fits, gather

# Share of free memory above which allocators and page tables may exceed it.
TIGHT = 0.8
GPUS_TIMEOUT_S = 60.0
MORE_RAM = "more memory (Slurm: --mem=0; docker run --memory; Kubernetes: limits.memory)"


SLOTS, ENGINES = "placement.slots", "placement.engines"


def check_placement(context: CheckContext) -> list[Finding]:
    """Check placement.slots and placement.engines."""
    wanted, config = slots_on_nodes(context.config), context.config
    ranks_per_engine = config.rollout.tensor_parallel_size
    allow = config.placement.allow_straddle
    sampling = sampling_slots_on_nodes(config)
    engines = judge_engines(sampling, ranks_per_engine, allow_straddle=allow)
    if context.agents.resources is not None:
        return [judge_slots(context.agents.resources, wanted, on_gpu=context.on_gpu), engines]
    if len(wanted) > 1:
        return [skipped(SLOTS, "all", "Ray does not run yet"), engines]
    # Without a cluster the checks of the config have counted this machine's slots.
    evidence = f"{wanted[0]} rank(s); this machine has {context.machine.describe()}"
    return [ok(SLOTS, context.agents.nodes[0], evidence), engines]


def judge_slots(nodes: Mapping[str, Resources], wanted: Sequence[int], *, on_gpu: bool) -> Finding:
    """Judge placement.slots, largest demand on the largest node."""
    what = "GPUs" if on_gpu else "CPUs"
    counts = [(n.free_gpus, n.gpus) if on_gpu else (n.free_cpus, n.cpus) for n in nodes.values()]
    # Ranks without a GPU share cores of the run, but not a core of another run.
    demand = wanted if on_gpu else [min(slots, 1) for slots in wanted]
    each = "; ".join(
        f"{node}: {free:g} of {total:g} {what} free"
        for node, (free, total) in zip(nodes, counts, strict=True)
    )
    evidence = f"{each}; the run wants {', '.join(map(str, wanted))} ranks"
    advice = (
        "`ray status` shows what is in use, `ray list actors --filter state=ALIVE` by which actor. "
        "End that run, start Ray on more nodes, or lower cluster.nodes or cluster.gpus_per_node."
    )
    if fits(demand, [free for free, _ in counts]):
        return ok(SLOTS, "all", evidence)
    return fail(SLOTS, "all", evidence, advice)


def judge_engines(wanted: Sequence[int], ranks_per_engine: int, *, allow_straddle: bool) -> Finding:
    """Judge placement.engines: consecutive ranks of an engine share a node."""
    from hybridrl.controller.placement import Slot, straddling_engines

    slots = [Slot(str(n), "0.0.0.0", k) for n, count in enumerate(wanted) for k in range(count)]
    engines, astride = len(slots) // ranks_per_engine, straddling_engines(slots, ranks_per_engine)
    if not astride:
        return ok(ENGINES, "all", f"{engines} engine(s) of {ranks_per_engine}, one node each")
    evidence = f"engine(s) {', '.join(map(str, astride))} of {engines} lie on several nodes"
    advice = (
        "Set rollout.tensor_parallel_size to a divisor of every node's ranks: otherwise "
        "activations cross nodes in every layer."
    )
    return (warn if allow_straddle else fail)(ENGINES, "all", evidence, advice)


def check_memory(context: CheckContext) -> list[Finding]:
    """Check memory.host and, unless `context.quick`, memory.gpu."""
    hosts, findings = gather(context.agents, "memory.host", host_memory)
    findings += [judge_host_memory(n, m, context, context.slots[n]) for n, m in hosts.items()]
    if context.quick:
        return findings
    if not context.on_gpu:
        return [*findings, skipped("memory.gpu", "all", "hardware = cpu")]
    probe = (gpu_facts, False, True)
    gpus, silent = gather(context.agents, "memory.gpu", *probe, timeout_s=GPUS_TIMEOUT_S)
    findings += silent
    for node, facts in gpus.items():
        findings += judge_gpu_memory(node, facts, context, context.slots[node])
    return findings


def host_memory() -> Limit:
    """Return the memory of this node that is left: of its narrowest cgroup, or of the machine."""
    ram, cgroup = psutil.virtual_memory(), cgroup_facts().memory
    machine = Limit("the machine", ram.total, ram.total - ram.available)
    return machine if cgroup is None or machine.left < cgroup.left else cgroup


def judge_host_memory(node: str, memory: Limit, context: CheckContext, slots: int) -> Finding:
    """Judge memory.host of a node with this number of ranks."""
    config = context.config
    needed, parts = _needed(context, slots)
    left = f"{gib(memory.left)} are left of the {gib(memory.limit)} that {memory.group} allows"
    evidence = f"the run needs {gib(needed)} of RAM here ({parts}); {left}"
    remedy = "Choose a smaller model"
    if pinned_bytes(config, context.shape, context.frozen):
        evidence += f"; fsdp.offload = {config.fsdp.offload}"
        remedy = "fsdp.offload=none (or idle_optimizer)"
    killed = f"{evidence}: the kernel would kill workers"
    rules: list[Rule] = [
        (fails_if(needed > memory.left), killed, f"{remedy}, fewer ranks, or {MORE_RAM}"),
        (warns_if(needed > TIGHT * memory.left), evidence, f"End other processes, or {MORE_RAM}"),
    ]
    return first("memory.host", node, rules, evidence)


def _needed(context: CheckContext, slots: int) -> tuple[int, str]:
    """Predict RAM in bytes for this number of ranks, and describe its parts."""
    config, shape, frozen = context.config, context.shape, context.frozen
    if context.on_gpu:
        parts = host_parts(config, shape, frozen).values()
        rank = sum(parts)
        each = "{}, {} for loading, {} for offload and {} for checkpoints pinned, {} of teachers"
        each = each.format(*map(gib, parts))
    else:
        rank = largest(rank_phases(config, shape, None, frozen)).total
        each = f"at least {gib(rank)}"
    return on_node(slots, rank), f"{slots} x {each}, {gib(CPU_DRIVER_BYTES)} for driver and Ray"


def judge_gpu_memory(
    node: str, facts: GPUFacts, context: CheckContext, slots: int
) -> list[Finding]:
    """Judge memory.gpu of the GPUs of a node that the run uses, one per rank."""
    check, by_uuid = "memory.gpu", {gpu.uuid: gpu for gpu in facts.smi or ()}
    gpus = [by_uuid[uuid] for uuid in facts.seen if uuid in by_uuid]
    if facts.error or not gpus or not slots:
        why = facts.error or ("no rank is placed here" if gpus else "no GPU is visible")
        return [skipped(check, node, why)]
    findings = []
    for index, gpu in enumerate(gpus[:slots]):
        total, free = gpu.total_mib * MIB, gpu.free_mib * MIB
        peak = largest(rank_phases(context.config, context.shape, total, context.frozen))
        others = [process for process in facts.processes if process.uuid == gpu.uuid]
        listed = ", ".join(f"{p.name} (pid {p.pid}, {p.used_mib} MiB)" for p in others)
        there = f"{gib(free)} of {gib(total)} are free{f'; in use by {listed}' if listed else ''}"
        evidence = f"GPU {index}: {peak.name} needs {describe(peak)}; {there}"
        # vLLM refuses to start with less, whatever it will allocate.
        share = context.config.rollout.gpu_memory_utilization
        at_start = f"GPU {index}: vLLM starts with {gib(share * total)} free memory; {there}"
        end = f"kill {' '.join(p.pid for p in others)}" if others else "End what uses that GPU"
        fix = "or lower rollout.gpu_memory_utilization and actor.max_tokens_per_gpu"
        rules: list[Rule] = [
            (fails_if(peak.total > free), evidence, f"{end}; {fix}, or fsdp.offload=idle_all"),
            (fails_if(share * total > free), at_start, f"{end}; {fix}"),
            (warns_if(others), evidence, f"{end}, unless it shall share the GPU"),
        ]
        findings.append(first(check, node, rules, evidence))
    return findings
