"""Nodes, cores, RAM and GPUs of a machine or cluster, looked up without torch."""

import os
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from hybridrl.config.choices import Accelerator
from hybridrl.config.planner import nvidia_smi

GIB = 2**30

# Threads of torch's CPU operations on a host with GPUs. Idle threads spin between operations: with
# one per core in several processes they would slow down the threads that feed the GPUs.
MAX_THREADS_PER_GPU = 8

# Size of Ray's object store in a node's shared memory: enough for the batches of a few steps.
STORE_BYTES = {Accelerator.gpu: 2 * GIB, Accelerator.cpu: GIB // 4}

# RAM of a node that is planned, not there.
UNKNOWN_RAM = 2**60

# Variables with settings of torch's GPU allocator.
ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")

# As the first entry of CUDA_VISIBLE_DEVICES these hide every GPU.
NONE_VISIBLE = ("", "-1", "none", "void", "nodevfiles")


@dataclass(frozen=True)
class GPU:
    """One GPU: its name and memory in bytes."""

    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Node:
    """One machine: resources that processes on it may use.

    Attributes:
        name: host name, or the cluster's name for it.
        cores: CPU cores.
        memory_bytes: RAM, or the container's limit if that is lower.
        gpus: in the order of their indices.
        gpu_error: why none is usable although nvidia-smi exists; else empty.
    """

    name: str
    cores: int
    memory_bytes: int
    gpus: tuple[GPU, ...] = ()
    gpu_error: str = ""


@dataclass(frozen=True)
class Machine:
    """The nodes a run may use: one, or those of a Ray cluster."""

    nodes: tuple[Node, ...]

    @property
    def gpus(self) -> tuple[GPU, ...]:
        """GPUs of all nodes, node by node."""
        return tuple(gpu for node in self.nodes for gpu in node.gpus)

    @property
    def gpu_error(self) -> str:
        """Why no GPU is usable although nvidia-smi exists; else empty."""
        errors = [f"{node.gpu_error} (on {node.name})" for node in self.nodes if node.gpu_error]
        return errors[0] if errors and not self.gpus else ""

    def describe(self) -> str:
        """Return one line: '2 nodes, 16 x NVIDIA H200 (140 GiB), 64 cores, 1024 GiB RAM'."""
        nodes = f"{len(self.nodes)} nodes, " if len(self.nodes) > 1 else ""
        names = sorted({f"{gpu.name} ({gpu.memory_bytes / GIB:.0f} GiB)" for gpu in self.gpus})
        none = "no usable GPU" if self.gpu_error else "no NVIDIA GPU"
        gpus = f"{len(self.gpus)} x {' / '.join(names)}" if names else none
        if any(node.memory_bytes == UNKNOWN_RAM for node in self.nodes):
            return f"{nodes}{gpus}, planned"
        cores = sum(node.cores for node in self.nodes)
        ram = sum(node.memory_bytes for node in self.nodes) / GIB
        return f"{nodes}{gpus}, {cores} core{'s' if cores != 1 else ''}, {ram:.0f} GiB RAM"


def local_machine() -> Machine:
    """Return this machine as one node."""
    gpus, error = _gpus()
    cores = len(os.sched_getaffinity(0))  # CPU shares do not count
    node = Node(socket.gethostname(), cores, memory_limit(), tuple(gpus), error)
    return Machine((node,))


def planned_machine(counts: Iterable[int], gpu: GPU) -> Machine:
    """Return a machine that is not there: nodes with these numbers of such GPUs."""
    return Machine(
        tuple(
            Node(f"node {index}", count * MAX_THREADS_PER_GPU, UNKNOWN_RAM, (gpu,) * count)
            for index, count in enumerate(counts)
        )
    )


def with_any_ram(machine: Machine) -> Machine:
    """Return a machine whose nodes have all the RAM that a run may need."""
    return Machine(tuple(replace(node, memory_bytes=UNKNOWN_RAM) for node in machine.nodes))


def torch_threads(*, on_gpu: bool, processes: int) -> int:
    """Return the threads for torch's CPU operations in each of `processes` on this machine."""
    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    return min(threads, MAX_THREADS_PER_GPU) if on_gpu else threads


def memory_limit(root: Path = Path("/")) -> int:
    """Return the RAM in bytes, or the limit of this process's cgroup if that is lower."""
    meminfo = (root / "proc/meminfo").read_text()
    total = next(
        int(line.split()[1]) * 1024 for line in meminfo.splitlines() if line.startswith("MemTotal:")
    )
    return min([total, *_cgroup_limits(root)])


def cgroups(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folders of this process's cgroup (v1 or v2) and its parents.

    `controller` is memory, pids or cpu, `root` that of the file system with /proc and /sys.
    """
    listing = root / "proc/self/cgroup"
    for line in listing.read_text().splitlines() if listing.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / controller
        else:
            continue
        group = base / path.lstrip("/")
        # In a container the path may be the host's, of which only the root is mounted.
        for folder in (group, *group.parents):
            if not folder.is_relative_to(base):
                break
            if folder.is_dir():
                yield folder


def _cgroup_limits(root: Path) -> Iterator[int]:
    """Yield the memory limits of this process's cgroup and its parents."""
    for group in cgroups("memory", root):
        for file in (group / "memory.max", group / "memory.limit_in_bytes"):  # v2, v1
            text = file.read_text().strip() if file.is_file() else ""
            # Without a limit v2 has "max", v1 a number near 2^63.
            if text.isdigit():
                yield int(text)


def _gpus() -> tuple[list[GPU], str]:
    """Return the visible NVIDIA GPUs of this machine, and `Node.gpu_error`."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.split(",")[0].strip().lower() in NONE_VISIBLE:
        return [], ""
    text, error = nvidia_smi.ask("uuid,name,memory.total")
    if error:
        return [], "" if error == nvidia_smi.NOT_THERE else error
    gpus = parse_nvidia_smi(text)
    if text.strip() and not gpus:
        first = text.strip().splitlines()[0]
        return [], nvidia_smi.failed(f"output {first!r}, expected UUID, name, MiB")
    chosen = visible_gpus(gpus, visible)
    if gpus and not chosen:
        return [], (
            f"CUDA_VISIBLE_DEVICES={visible} names none of the {len(gpus)} GPUs here (MIG is not "
            "supported); unset it, or set indices such as 0,1, or -1 to hide all"
        )
    return chosen, ""


def parse_nvidia_smi(text: str) -> list[tuple[str, GPU]]:
    """Return (UUID, GPU) pairs from lines 'UUID, name, MiB'; skip other lines."""
    gpus = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) >= 3 and parts[-1].isdigit():
            gpus.append((parts[0], GPU(", ".join(parts[1:-1]), int(parts[-1]) * 2**20)))
    return gpus


def visible_gpus(gpus: list[tuple[str, GPU]], visible: str | None) -> list[GPU]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES selects, in its order.

    Args:
        gpus: (UUID, GPU) pairs in the order of their indices.
        visible: indices or UUID prefixes, separated by commas; None: all. As in CUDA, an invalid
            entry hides itself and all later ones.
    """
    if visible is None:
        return [gpu for _, gpu in gpus]
    chosen: list[GPU] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.isdigit() and int(entry) < len(gpus):
            chosen.append(gpus[int(entry)][1])
        elif entry and (named := [gpu for uuid, gpu in gpus if uuid.startswith(entry)]):
            chosen.append(named[0])
        else:
            break
    return chosen
