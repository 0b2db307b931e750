"""Checks against the machine, files on disk and installed packages."""

import importlib.util
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybridrl.config.choices import Accelerator, Offload
from hybridrl.config.command.input_errors import expanded, is_address, reason_of
from hybridrl.config.command.report import shown
from hybridrl.config.planner.machine import Machine
from hybridrl.config.schema import RunConfig

SLOTS_PER_CORE = 4
DATA_SUFFIXES = (".jsonl", ".parquet")


def node_problems(config: RunConfig, machine: Machine) -> Iterator[str]:
    """Check the number of nodes."""
    nodes, there = config.cluster.nodes, len(machine.nodes)
    if nodes > there:
        yield (
            f"cluster.nodes = {nodes}, expected at most {there}: {machine.describe()}.\n"
            f"Set cluster.nodes={there}, or start Ray on all nodes and set RAY_ADDRESS."
        )


def slot_problems(config: RunConfig, machine: Machine) -> Iterator[str]:
    """Check the number of GPUs, or of cores for CPU slots, of each node, largest with largest."""
    wanted, slots = config.cluster.gpus_per_node, config.placement.slots_on_nodes
    assert wanted is not None
    key = f"cluster.gpus_per_node = {wanted}"
    if config.hardware.accelerator is Accelerator.cpu:
        cores = sorted((n.cores for n in machine.nodes), reverse=True)[: config.cluster.nodes]
        most = SLOTS_PER_CORE * min(cores)
        if wanted > most:
            yield (
                f"{key} CPU slots, expected at most {most}: {SLOTS_PER_CORE} for each of a node's "
                f"{min(cores)} cores; more would be slower.\n"
                f"Set cluster.gpus_per_node={most} or less."
            )
    elif machine.gpus and slots is not None:
        there = gpu_counts(machine, len(slots))
        pairs = zip(sorted(slots, reverse=True), there, strict=False)
        if any(count > found for count, found in pairs):
            yield (
                f"placement.slots_on_nodes = {slots}, but the nodes have {there} GPUs "
                f"({machine.describe()}).\n"
                f"Set placement.slots_on_nodes={there} or less."
            )
    elif machine.gpus and wanted > (most := gpu_counts(machine, config.cluster.nodes)[-1]):
        yield (
            f"{key}, expected at most {most}, the GPUs on each node "
            f"({machine.describe()}{_shows_no_more(machine)}).\n"
            f"Set cluster.gpus_per_node={most} or less."
        )


def _shows_no_more(machine: Machine) -> str:
    """Return the variable that may hide GPUs, to stand behind those seen; empty if it is unset."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") if len(machine.nodes) == 1 else None
    return "" if visible is None else f"; CUDA_VISIBLE_DEVICES={visible} shows no more"


def gpu_counts(machine: Machine, nodes: int) -> list[int]:
    """Return the GPU counts of the `nodes` largest nodes, largest first."""
    return sorted((len(node.gpus) for node in machine.nodes), reverse=True)[:nodes]


def accelerator_problems(config: RunConfig, machine: Machine) -> Iterator[str]:
    """Check that hardware=gpu finds a GPU; a dry run may plan for another machine."""
    if config.hardware.accelerator is not Accelerator.gpu or machine.gpus:
        return
    if not config.run.dry:
        there = f"this machine has {machine.describe()}{_shows_no_more(machine)}"
        yield (
            f"hardware = gpu, but {machine.gpu_error or there}.\n"
            f"Set hardware=cpu, or add run.dry=true to plan for another machine."
        )


def cpu_problems(config: RunConfig) -> Iterator[str]:
    """Check that a run without GPU sets the size of the KV cache, and does not offload."""
    if config.hardware.accelerator is not Accelerator.cpu:
        return
    if config.rollout.kv_cache_mb is None:
        yield (
            "rollout.kv_cache_mb = null, expected a size in MiB: without a GPU "
            "rollout.gpu_memory_utilization has no effect.\n"
            "Set rollout.kv_cache_mb=64 or more."
        )
    if config.fsdp.offload is not Offload.none:
        yield (
            f"fsdp.offload = {config.fsdp.offload}, expected none with hardware = cpu, where there "
            f"is no GPU memory to free.\nSet fsdp.offload=none."
        )


def file_problems(key: str, value: Any) -> Iterator[str]:
    """Check that the files of a path, a list of paths or None can be read."""
    if value is None:
        return
    paths = value if isinstance(value, list) else [value]
    if not paths or not all(isinstance(path, str) and path for path in paths):
        yield f"{key} = {value}, expected a path or a list of paths such as [a.jsonl,b.jsonl]."
        return
    for path in paths:
        if problem := _file_problem(path):
            yield f"{key} = {shown(path)}{problem}"


def _file_problem(path: str) -> str | None:
    """Return the problem of a data file, as the end of a sentence that begins with its path."""
    if is_address(path):
        return (
            " is an address on the network, expected a local file. Download it, and set the "
            "copy's path."
        )
    file = expanded(path)
    try:
        mode = file.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return f": there is no such file (seen from {Path.cwd()})."
    except (OSError, ValueError) as error:
        return f": it cannot be read: {reason_of(error)}."
    if stat.S_ISDIR(mode):
        return " is a folder, expected a file. Set the paths of its .jsonl or .parquet files."
    if not stat.S_ISREG(mode):
        return " is a device or a pipe, expected a regular file: it is read more than once."
    if file.suffix not in DATA_SUFFIXES:
        return ", expected a file that ends in .jsonl or .parquet."
    return None if os.access(file, os.R_OK) else ": it cannot be read: Permission denied."


def package_problems(config: RunConfig) -> Iterator[str]:
    """Check that the packages of the chosen trackers are installed."""
    tracking = config.tracking
    for key, value, off, package in (
        ("tensorboard", "true" if tracking.tensorboard else None, "false", "tensorboard"),
        ("wandb_project", tracking.wandb_project, "null", "wandb"),
        ("mlflow_uri", tracking.mlflow_uri, "null", "mlflow"),
    ):
        if value is not None and importlib.util.find_spec(package) is None:
            yield (
                f"tracking.{key} = {value} needs the package {package}, which is not installed.\n"
                f"Run pip install {package}, or set tracking.{key}={off}."
            )
