"""Derivation of config values that are null: GPUs, shards, sequences, processes."""

import math

from hybridrl.config.checks.resources import gpu_count_problems, gpu_counts, gpus_on_each
from hybridrl.config.checks.sizes import mesh_problems
from hybridrl.config.choices import Accelerator
from hybridrl.config.command.report import Report
from hybridrl.config.planner.machine import Machine
from hybridrl.config.planner.world import world_size
from hybridrl.config.schema import RunConfig

MAX_REWARD_PROCESSES = 8
# vLLM's own default on GPUs of 70 GiB and more; its KV cache may hold fewer at a time.
MAX_NUM_SEQS = 1024


def derive(config: RunConfig, machine: Machine, report: Report) -> None:
    """Replace nulls by numbers; add what cannot be derived to the report."""
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
    """Resolve placement.slots_on_nodes from unequal nodes, and gpus_per_node from it."""
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
    """Return the responses per engine and step, at most MAX_NUM_SEQS; that also if unknown."""
    ranks = ["cluster.nodes", "cluster.gpus_per_node", "rollout.tensor_parallel_size"]
    if not report.usable([*ranks, "data.prompts_per_step", "rollout.responses_per_prompt"]):
        return MAX_NUM_SEQS
    engines = max(1, world_size(config) // config.rollout.tensor_parallel_size)
    prompts = math.ceil(config.data.prompts_per_step / engines)
    return min(MAX_NUM_SEQS, prompts * config.rollout.responses_per_prompt)


def _slots(config: RunConfig, machine: Machine, report: Report) -> int | None:
    """Return the default number of processes per node; None if it is unknown."""
    if not report.usable(["hardware.accelerator", "cluster.nodes", "run.dry"]):
        return None
    if config.hardware.accelerator is Accelerator.cpu:
        return 1
    if machine.gpus:
        return max(1, gpus_on_each(machine, config.cluster.nodes))
    for problem in gpu_count_problems(config):
        report.add(problem)
    return None
