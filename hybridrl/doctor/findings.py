"""Ids of all checks, findings of the doctor, and the rules that make them.

docs/troubleshooting.md maps symptoms to the ids.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any


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


# Measurements by sender, receiver and unit.
Matrix = Mapping[str, Mapping[str, Mapping[str, float]]]


class Verdict(Enum):
    """Severity of a finding."""

    ok = "ok"
    warn = "warn"
    fail = "fail"
    skipped = "skipped"


# Severity (None: the rule does not apply), evidence, remedy.
Rule = tuple[Verdict | None, str, str]


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        check: id, from `CHECKS`.
        node: a node, "a -> b" for a pair, "all" for the cluster.
        verdict: ok, warn, fail, or skipped.
        evidence: measured values; of a skipped check, the reason.
        advice: remedy, with the command or setting to type; only of warn and fail.
        tables: measurements between pairs for the report, by title.
    """

    check: str
    node: str
    verdict: Verdict
    evidence: str
    advice: str = ""
    tables: Mapping[str, Matrix] | None = None

    def __post_init__(self) -> None:
        assert self.check in CHECKS, f"{self.check} is not in the catalog"
        needs_advice = self.verdict in (Verdict.warn, Verdict.fail)
        assert bool(self.advice) == needs_advice, f"{self.check}: advice goes with warn and fail"

    def as_json(self) -> dict[str, Any]:
        """Return plain values for doctor.json, without the tables."""
        values = asdict(self) | {"verdict": self.verdict.value}
        del values["tables"]
        return values


def ok(check: str, node: str, evidence: str) -> Finding:
    """Return a finding of a check that passed."""
    return Finding(check, node, Verdict.ok, evidence)


def warn(check: str, node: str, evidence: str, advice: str) -> Finding:
    """Return a finding of a run that is possible, but slower or less safe."""
    return Finding(check, node, Verdict.warn, evidence, advice)


def fail(check: str, node: str, evidence: str, advice: str) -> Finding:
    """Return a finding of a run that would fail or hang."""
    return Finding(check, node, Verdict.fail, evidence, advice)


def skipped(check: str, node: str, why: str) -> Finding:
    """Return a finding of a check that was not made."""
    return Finding(check, node, Verdict.skipped, why)


def severity(fails: object, warns: object) -> Verdict | None:
    """Return the severity of a rule from its two conditions; None if neither holds."""
    return Verdict.fail if fails else Verdict.warn if warns else None


def fails_if(condition: object) -> Verdict | None:
    """Return the severity of a rule that fails."""
    return severity(condition, False)


def warns_if(condition: object) -> Verdict | None:
    """Return the severity of a rule that warns."""
    return severity(False, condition)


def apply(check: str, node: str, rules: Iterable[Rule], passed: str) -> list[Finding]:
    """Return a finding for each rule that applies, or one ok with evidence `passed`."""
    found = [
        Finding(check, node, verdict, evidence, advice)
        for verdict, evidence, advice in rules
        if verdict is not None
    ]
    return found or [ok(check, node, passed)]


def first(check: str, node: str, rules: Iterable[Rule], passed: str) -> Finding:
    """Return the finding of the first rule that applies, or ok with evidence `passed`."""
    return apply(check, node, rules, passed)[0]
