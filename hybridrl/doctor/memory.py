"""Memory stage: the planner's prediction against free memory of each node and GPU."""

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
from hybridrl.doctor.context import CheckContext, gather
from hybridrl.doctor.findings import Finding, Rule, fails_if, first, skipped, warns_if
from hybridrl.doctor.host.facts import Limit, cgroup_facts
from hybridrl.doctor.host.gpus import GPUFacts, gpu_facts

# Share of free memory above which allocators and page tables may exceed it.
TIGHT = 0.8
GPUS_TIMEOUT_S = 60.0
MORE_RAM = "more memory (Slurm: --mem=0; docker run --memory; Kubernetes: limits.memory)"


def check(context: CheckContext) -> list[Finding]:
    """Check memory.host and, unless `context.quick`, memory.gpu."""
    hosts, found = gather(context.agents, "memory.host", host_memory)
    found += [judge_host_memory(n, m, context, context.slots[n]) for n, m in hosts.items()]
    if context.quick:
        return found
    if not context.on_gpu:
        return [*found, skipped("memory.gpu", "all", "hardware = cpu")]
    probe = (gpu_facts, False, True)
    gpus, silent = gather(context.agents, "memory.gpu", *probe, timeout_s=GPUS_TIMEOUT_S)
    found += silent
    for node, facts in gpus.items():
        found += judge_gpu_memory(node, facts, context, context.slots[node])
    return found


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
    if pinned_bytes(config, context.shape, context.reward_shape):
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
    config, shape, reward_shape = context.config, context.shape, context.reward_shape
    if context.on_gpu:
        parts = host_parts(config, shape, reward_shape).values()
        rank = sum(parts)
        each = "{}, {} for loading, {} for offload and {} for checkpoints pinned"
        each = each.format(*map(gib, parts))
    else:
        rank = largest(rank_phases(config, shape, None, reward_shape)).total
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
    found = []
    for index, gpu in enumerate(gpus[:slots]):
        total, free = gpu.total_mib * MIB, gpu.free_mib * MIB
        peak = largest(rank_phases(context.config, context.shape, total, context.reward_shape))
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
        found.append(first(check, node, rules, evidence))
    return found
