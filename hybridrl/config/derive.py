"""Numbers in place of the nulls that mean "derive it"."""

import math

from hybridrl.config.checks.resources import gpu_count_problems, gpu_counts, gpus_on_each
from hybridrl.config.checks.sizes import mesh_problems, world_size
from hybridrl.config.choices import Accelerator
from hybridrl.config.command.report import Report
from hybridrl.config.planner.machine import Machine
from hybridrl.config.schema import RunConfig

MAX_REWARD_PROCESSES = 8
# What vLLM itself takes on GPUs of 70 GiB and more; its KV cache may hold fewer at a time.
MAX_NUM_SEQS = 1024


def derive(config: RunConfig, machine: Machine, report: Report) -> None:
    """Put numbers in place of nulls; what cannot be derived joins the report."""
    cluster, fsdp = config.cluster, config.fsdp
    _resolve_nodes(config, machine, report)
    if cluster.gpus_per_node is None and report.usable(["cluster.gpus_per_node"]):
        cluster.gpus_per_node = _slots(config, machine, report)
        if cluster.gpus_per_node is None:
            report.broken.add("cluster.gpus_per_node")
    if fsdp.dp_shard is None and report.usable(
        ["cluster.nodes", "cluster.gpus_per_node", "fsdp.dp_replicate", "fsdp.dp_shard"]
    ):
        if world_size(config) % fsdp.dp_replicate == 0:
            fsdp.dp_shard = world_size(config) // fsdp.dp_replicate
        else:
            for problem in mesh_problems(config):
                report.add(problem)
            report.broken.add("fsdp.dp_shard")
    if config.rollout.max_num_seqs is None:
        config.rollout.max_num_seqs = _num_seqs(config, report)
    if config.reward.num_processes is None:
        config.reward.num_processes = max(1, min(MAX_REWARD_PROCESSES, machine.nodes[0].cores))


def _resolve_nodes(config: RunConfig, machine: Machine, report: Report) -> None:
    """Unequal nodes: those that were given, or else GPUs as the machine's nodes have them."""
    cluster, placement = config.cluster, config.placement
    keys = ["cluster.nodes", "cluster.gpus_per_node", "placement", "rollout.tensor_parallel_size"]
    if not report.usable([*keys, "hardware.accelerator"]):
        return
    if placement.slots_on_nodes is None and cluster.gpus_per_node is None:
        counts = gpu_counts(machine, cluster.nodes)
        tp = 1 if placement.allow_straddle else config.rollout.tensor_parallel_size
        unequal = len(set(counts)) > 1 and min(counts) >= tp
        if config.hardware.accelerator is Accelerator.gpu and unequal:
            placement.slots_on_nodes = [count // tp * tp for count in counts]
    if placement.slots_on_nodes:
        cluster.gpus_per_node = max(placement.slots_on_nodes)


def _num_seqs(config: RunConfig, report: Report) -> int:
    """Responses that one engine is dealt in a step, up to MAX_NUM_SEQS; that where unknown."""
    ranks = ["cluster.nodes", "cluster.gpus_per_node", "rollout.tensor_parallel_size"]
    if not report.usable([*ranks, "data.prompts_per_step", "rollout.responses_per_prompt"]):
        return MAX_NUM_SEQS
    engines = max(1, world_size(config) // config.rollout.tensor_parallel_size)
    prompts = math.ceil(config.data.prompts_per_step / engines)
    return min(MAX_NUM_SEQS, prompts * config.rollout.responses_per_prompt)


def _slots(config: RunConfig, machine: Machine, report: Report) -> int | None:
    """Processes on each node where the config leaves them open; None if that cannot be said."""
    if not report.usable(["hardware.accelerator", "cluster.nodes", "run.dry"]):
        return None
    if config.hardware.accelerator is Accelerator.cpu:
        return 1
    if machine.gpus:
        return max(1, gpus_on_each(machine, config.cluster.nodes))
    for problem in gpu_count_problems(config):
        report.add(problem)
    return None
