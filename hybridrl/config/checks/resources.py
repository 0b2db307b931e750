"""Checks against the machine and installed packages."""

import importlib.util
import os
from collections.abc import Iterator

from hybridrl.config.choices import Accelerator, Offload
from hybridrl.config.errors import Problem, must_be
from hybridrl.config.planner.machine import Machine
from hybridrl.config.schema import RunConfig

SLOTS_PER_CORE = 4


def accelerator_problems(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    """Check that hardware=gpu finds a GPU; a dry run may plan for another machine."""
    if config.hardware.accelerator is Accelerator.gpu and not machine.gpus and not config.run.dry:
        there = f"this machine has {machine.describe()}{_shows_no_more(machine)}"
        why = machine.gpu_error or there
        remedy = "Set hardware=cpu, or add run.dry=true to plan for another machine"
        yield Problem("no_gpu", "hardware", "gpu", "", why, remedy)


def node_problems(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    """Check the number of nodes."""
    nodes, there = config.cluster.nodes, len(machine.nodes)
    if nodes > there:
        key, expected = "cluster.nodes", f"at most {there}"
        remedy = f"Set {key}={there}, or start Ray on all nodes and set RAY_ADDRESS"
        yield Problem("nodes", key, nodes, expected, machine.describe(), remedy)


def slot_problems(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    """Check the number of GPUs, or of cores for CPU slots, of each node, largest with largest."""
    wanted, slots = config.cluster.gpus_per_node, config.placement.slots_on_nodes
    assert wanted is not None
    key, about = "cluster.gpus_per_node", f"{machine.describe()}{_shows_no_more(machine)}"
    if config.hardware.accelerator is Accelerator.cpu:
        cores = sorted((n.cores for n in machine.nodes), reverse=True)[: config.cluster.nodes]
        most = SLOTS_PER_CORE * min(cores)
        why = f"{SLOTS_PER_CORE} for each of a node's {min(cores)} cores; more would be slower"
    elif machine.gpus and slots is not None:
        there = gpu_counts(machine, len(slots))
        pairs = zip(sorted(slots, reverse=True), there, strict=False)
        if any(count > available for count, available in pairs):
            key, expected = "placement.slots_on_nodes", f"at most the GPUs of the nodes, {there}"
            yield Problem("slots", key, slots, expected, about, f"Set {key}={there} or less")
        return
    elif machine.gpus:
        most, why = gpu_counts(machine, config.cluster.nodes)[-1], f"each node's GPUs ({about})"
    else:
        return
    if wanted > most:
        yield Problem("slots", key, wanted, f"at most {most}", why, f"Set {key}={most} or less")


def _shows_no_more(machine: Machine) -> str:
    """Return the variable that may hide GPUs, to stand behind those seen; empty if it is unset."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") if len(machine.nodes) == 1 else None
    return "" if visible is None else f"; CUDA_VISIBLE_DEVICES={visible} shows no more"


def gpu_counts(machine: Machine, nodes: int) -> list[int]:
    """Return the GPU counts of the `nodes` largest nodes, largest first."""
    return sorted((len(node.gpus) for node in machine.nodes), reverse=True)[:nodes]


def cpu_problems(config: RunConfig) -> Iterator[Problem]:
    """Check that a run without GPU sets the size of the KV cache, and does not offload."""
    if config.hardware.accelerator is not Accelerator.cpu:
        return
    if config.rollout.kv_cache_mb is None:
        key, expected = "rollout.kv_cache_mb", "a size in MiB with hardware = cpu"
        why = "without a GPU rollout.gpu_memory_utilization has no effect"
        yield Problem("cpu_cache", key, None, expected, why, f"Set {key}=64 or more")
    offload = config.fsdp.offload
    if offload is not Offload.none:
        why = "with hardware = cpu there is no GPU memory to free"
        yield must_be("cpu_offload", "fsdp.offload", offload, "none", why)


def package_problems(config: RunConfig) -> Iterator[Problem]:
    """Check that the packages of the chosen trackers are installed."""
    tracking = config.tracking
    for name, value, off, package in (
        ("tensorboard", "true" if tracking.tensorboard else None, "false", "tensorboard"),
        ("wandb_project", tracking.wandb_project, "null", "wandb"),
        ("mlflow_uri", tracking.mlflow_uri, "null", "mlflow"),
    ):
        if value is not None and importlib.util.find_spec(package) is None:
            key, why = f"tracking.{name}", f"it needs the package {package}, which is not installed"
            remedy = f"Run pip install {package}, or set {key}={off}"
            yield Problem("package", key, value, "", why, remedy)
