"""Ids of all checks, by stage; docs/troubleshooting.md maps symptoms to these ids."""

from enum import Enum


class Stage(Enum):
    """Stages in their order; a stage runs only if the stages before it found no failure."""

    host = "host"
    network = "network"
    ray = "ray"
    placement = "placement"
    inputs = "inputs"
    memory = "memory"
    training = "training"


CHECKS: dict[str, str] = {
    # host: each node by itself, and what must be equal on all
    "host.shm": "free shared memory, for Ray's object store, NCCL and vLLM",
    "host.limits": "open files, locked memory, processes (ulimit)",
    "host.cgroup": "memory and CPU limits of the cgroup, against what the run needs",
    "host.gpus": "GPUs by nvidia-smi, and GPUs visible to a process of the run",
    "host.visible_devices": "CUDA_, HIP_ and ROCR_VISIBLE_DEVICES agree",
    "host.variables": "environment variables that contradict each other or break the run",
    "host.allocator": "PYTORCH_CUDA_ALLOC_CONF against vLLM's sleep mode",
    "host.versions": "python, torch, vllm, ray, transformers and the driver, equal on all nodes",
    "host.communication_variables": "NCCL_*, RCCL_* and GLOO_*, equal on all nodes",
    "host.clock": "clocks of the nodes against each other",
    "host.temporary": "the temporary folder: free space, writable, length of its path",
    "host.terminal": "output is not buffered where there is no terminal",
    # network: between nodes
    "network.address": "each node has an address that the others can reach",
    "network.interfaces": "subnets, and connections to the interface of NCCL and gloo",
    "network.ports": "every port of the run is free and reachable, in both directions",
    "network.rendezvous": "the rendezvous port: free, and outside ip_local_port_range",
    "network.bandwidth": "latency and bandwidth of each pair of nodes, against the median",
    "network.collective": "an all-reduce over all nodes with gloo, and with NCCL on GPUs",
    "network.infiniband": "InfiniBand and RoCE ports: state, devices to open, GID index",
    # ray
    "ray.version": "Ray's version against the version that this package needs",
    "ray.reachable": "the head's services answer at RAY_ADDRESS",
    "ray.loopback": "the head listens on an address that other nodes can reach",
    "ray.port": "the head's port belongs to Ray",
    "ray.token": "token authentication: the same mode and token everywhere",
    "ray.nodes": "number of nodes alive against cluster.nodes",
    # placement
    "placement.slots": "free GPUs or CPU slots of each node",
    "placement.engines": "every rollout engine on one node",
    # inputs: model, data, caches
    "inputs.cache": "the Hugging Face cache: path, writable, owner",
    "inputs.cache_contents": "the cache holds the same files on all nodes",
    "inputs.model": "the model's files exist, are complete, and equal on all nodes",
    "inputs.tokenizer": "tokenizer and chat template load, and agree with the model",
    "inputs.data": "data files exist on the node that reads them",
    "inputs.reward": "8 rows through prompt and reward",
    "inputs.run_directory": "the run directory is writable, and shared by the nodes",
    # memory
    "memory.gpu": "the planner's prediction against free GPU memory",
    "memory.host": "the planner's prediction, pinned copies included, against free host memory",
    # training
    "training.steps": "two real steps of the recipe with small sizes",
}


def stage_of(check: str) -> Stage:
    """Return the stage of a check."""
    return Stage(check.partition(".")[0])
