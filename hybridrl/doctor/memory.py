"""Sixth stage: what the planner predicts against what each node and each GPU has left now."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hybridrl.config.choices import Accelerator
from hybridrl.config.planner import nvidia_smi
from hybridrl.config.planner.machine import GPU, visible_gpus
from hybridrl.config.planner.memory import (
    CPU_DRIVER_BYTES,
    MIB,
    Phase,
    describe,
    gib,
    host_parts,
    node_peak,
    node_ram,
    pinned_bytes,
    rank_phases,
)
from hybridrl.controller.ray.node_probes import call_all
from hybridrl.doctor.findings import Finding, fail, ok, skipped, warn
from hybridrl.doctor.host.cgroup import Limit, cgroup_facts
from hybridrl.doctor.host.gpus import FIELDS, Smi, parse
from hybridrl.doctor.host.stage import heard
from hybridrl.doctor.stages import Case

# Of what is left: allocators and page tables need some more than is predicted.
TIGHT = 0.8
GPUS_TIMEOUT_S = 60.0
MORE_RAM = "ask for more memory (Slurm: --mem=0; docker run --memory; Kubernetes: limits.memory)"


class HostMemory(NamedTuple):
    """Memory of a node in bytes.

    Attributes:
        available: what the kernel could give, page cache included.
        cgroup: the narrowest limit around this process; None without one.
    """

    available: int
    cgroup: Limit | None

    @property
    def left(self) -> int:
        """What the run can have."""
        return min(self.available, self.cgroup.left) if self.cgroup else self.available


class GPUProcess(NamedTuple):
    """A process that computes on a GPU, and the MiB it holds there, as nvidia-smi says."""

    uuid: str
    pid: str
    name: str
    used_mib: str


class GPUMemory(NamedTuple):
    """The GPUs that a run sees on a node, and who is there already."""

    gpus: list[Smi]
    processes: list[GPUProcess]
    error: str = ""


def check(case: Case) -> list[Finding]:
    """memory.host and, unless `case.quick`, memory.gpu, of each node by itself."""
    hosts, found = heard("memory.host", call_all(case.agents, host_memory))
    for node, memory in hosts.items():
        found.append(judge_host_memory(node, memory, case, case.slots[node]))
    if case.quick:
        return found
    if case.config.hardware.accelerator is not Accelerator.gpu:
        return [*found, skipped("memory.gpu", "all", "hardware = cpu")]
    answers = call_all(case.agents, gpu_memory, timeout_s=GPUS_TIMEOUT_S)
    gpus, silent = heard("memory.gpu", answers)
    found += silent
    for node, seen in gpus.items():
        found += judge_gpu_memory(node, seen, case, case.slots[node])
    return found


def host_memory() -> HostMemory:
    """What this node has left."""
    meminfo = Path("/proc/meminfo").read_text()
    available = next(
        int(line.split()[1]) * 1024
        for line in meminfo.splitlines()
        if line.startswith("MemAvailable:")
    )
    return HostMemory(available, cgroup_facts().memory)


def judge_host_memory(node: str, memory: HostMemory, case: Case, slots: int) -> Finding:
    """memory.host of one node, which may get so many ranks."""
    check, (needed, parts) = "memory.host", _needed(case, slots)
    has = f"{gib(memory.left)} are left"
    if memory.cgroup is not None and memory.left == memory.cgroup.left:
        group = memory.cgroup
        has += f" of the {gib(group.limit)} that {group.group} allows"
    evidence = f"the run needs {gib(needed)} of RAM here ({parts}); {has}"
    remedy = "Name a smaller model"
    if pinned_bytes(case.config, case.shape, case.reward_shape):
        evidence += f"; fsdp.offload = {case.config.fsdp.offload}"
        remedy = "fsdp.offload=none (or idle_optimizer)"
    if needed > memory.left:
        advice = f"{remedy}, a lower cluster.gpus_per_node, or {MORE_RAM}"
        return fail(check, node, f"{evidence}: the kernel would kill workers", advice)
    if needed > TIGHT * memory.left:
        return warn(check, node, evidence, f"End what else uses memory there, or {MORE_RAM}")
    return ok(check, node, evidence)


def _needed(case: Case, slots: int) -> tuple[int, str]:
    """RAM that the planner predicts in bytes for so many ranks, and what it is made of."""
    config = case.config
    if config.hardware.accelerator is Accelerator.gpu:
        parts = [gib(n) for n in host_parts(config, case.shape, case.reward_shape).values()]
        each = "{}, {} for loading, {} for offload and {} for checkpoints pinned".format(*parts)
        needed = node_ram(config, case.shape, case.reward_shape, slots)
    else:
        phases = rank_phases(config, case.shape, None, case.reward_shape)
        each = f"at least {gib(_peak(phases).total)}"
        needed = node_peak(config, phases, slots)
    return needed, f"{slots} x {each}, {gib(CPU_DRIVER_BYTES)} for driver and Ray"


def _peak(phases: list[Phase]) -> Phase:
    return max(phases, key=lambda phase: phase.total)


def gpu_memory() -> GPUMemory:
    """The GPUs of this node that CUDA_VISIBLE_DEVICES leaves visible."""
    text, error = nvidia_smi.ask(",".join(FIELDS))
    if error:
        return GPUMemory([], [], error)
    found = {gpu.uuid: gpu for gpu in parse(text, [])}
    named = [(uuid, GPU(uuid, gpu.total_mib * MIB)) for uuid, gpu in found.items()]
    visible = visible_gpus(named, os.environ.get("CUDA_VISIBLE_DEVICES"))
    text, _ = nvidia_smi.ask("gpu_uuid,pid,process_name,used_memory", "compute-apps")
    return GPUMemory([found[gpu.name] for gpu in visible], parse_processes(text))


def parse_processes(text: str) -> list[GPUProcess]:
    """Processes from lines 'UUID, pid, name, MiB'."""
    lines = [[part.strip() for part in line.split(",")] for line in text.splitlines()]
    return [GPUProcess(*parts) for parts in lines if len(parts) == len(GPUProcess._fields)]


def judge_gpu_memory(node: str, memory: GPUMemory, case: Case, slots: int) -> Iterator[Finding]:
    """memory.gpu of each GPU of a node that the run will use, one for each of its ranks."""
    check = "memory.gpu"
    if memory.error or not memory.gpus or not slots:
        why = memory.error or ("no rank comes here" if memory.gpus else "no GPU is visible")
        yield skipped(check, node, why)
        return
    for index, gpu in enumerate(memory.gpus[:slots]):
        total, free = gpu.total_mib * MIB, gpu.free_mib * MIB
        peak = _peak(rank_phases(case.config, case.shape, total, case.reward_shape))
        others = [process for process in memory.processes if process.uuid == gpu.uuid]
        listed = ", ".join(f"{p.name} (pid {p.pid}, {p.used_mib} MiB)" for p in others)
        there = f"; there already: {listed}" if listed else ""
        evidence = (
            f"GPU {index}: {peak.name} needs {describe(peak)}; {gib(free)} of {gib(total)} are "
            f"free{there}"
        )
        end = f"kill {' '.join(p.pid for p in others)}" if others else "End what uses that GPU"
        if peak.total > free:
            yield fail(
                check,
                node,
                evidence,
                f"{end}; or lower rollout.gpu_memory_utilization and actor.max_tokens_per_gpu, or "
                f"fsdp.offload=idle_all",
            )
        elif others:
            yield warn(check, node, evidence, f"{end}, unless it is to share the GPU")
        else:
            yield ok(check, node, evidence)
