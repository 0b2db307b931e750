"""Host stage: each node alone, and differences between nodes: versions, variables, clocks."""

import re
import time
from collections import Counter
from collections.abc import Mapping

from hybridrl.controller.ray.node_probes import NodeProbes, call_all
from hybridrl.doctor.findings import Finding, fail, ok, severity, skipped, warn
from hybridrl.doctor.host import variables
from hybridrl.doctor.host.facts import HostFacts, buffers_output, environment, host_facts
from hybridrl.doctor.host.gpus import gpu_facts, judge_gpus
from hybridrl.doctor.host.limits import judge_cgroup, judge_shm, judge_temporary, judge_ulimits
from hybridrl.doctor.stages import CheckContext, gather

GPUS_TIMEOUT_S = 120.0
COMMUNICATION = re.compile(r"(NCCL|RCCL|GLOO|FI|UCX)_\w+")
# Names of devices and log files: they may differ between nodes.
OF_THE_NODE = re.compile(
    r"\w+_(IFNAME|HCA|GID_INDEX|FILE|DEBUG|SUBSYS|DEVICES?|LEVEL)|NCCL_DEBUG\w*|FI_LOG_\w+|UCX_LOG_\w+"
)
# Version of a package that is not installed.
NONE = "none"
CLOCK_ROUNDS = 3
# Seconds between the clocks of two nodes.
ODD_CLOCK_S, WRONG_CLOCK_S = 1.0, 60.0
VERSION_ADVICE = {
    "driver": "Install the same driver on all nodes",
    "python": "Use python {usual} on all nodes (Ray refuses to mix versions)",
    "hybridrl sources": "Install the same checkout on all nodes, or keep it in a shared folder",
}


def check(context: CheckContext) -> list[Finding]:
    """Make all checks host.*; `context.quick` skips clocks and, of a run on CPUs, GPUs."""
    config, agents, slots = context.config, context.agents, context.slots
    facts, findings = gather(agents, "host.limits", host_facts)
    if not facts:
        return findings
    findings.append(
        variables.judge_terminal(agents.nodes[0], environment(), buffered=buffers_output())
    )
    for node, fact in facts.items():
        infiniband = fact.infiniband if config.cluster.nodes > 1 and slots[node] else ()
        findings.append(judge_shm(node, fact.shared_memory, config.hardware.accelerator))
        findings += judge_ulimits(node, fact.limits, slots[node], infiniband)
        findings += judge_cgroup(node, fact.cgroup, fact.cores, slots[node])
        findings += judge_temporary(node, fact.temporary)
        findings.append(variables.judge_visible(node, fact.environment, config))
        findings.append(variables.judge_allocator(node, fact.environment, config))
    findings += variables.judge_variables(facts, environment(), config)
    findings += judge_versions(facts)
    findings += judge_communication({n: f for n, f in facts.items() if slots[n]} or facts)
    if not context.quick or context.on_gpu:
        probe = (gpu_facts, not context.quick)
        gpus, silent = gather(agents, "host.gpus", *probe, timeout_s=GPUS_TIMEOUT_S)
        findings += silent
        findings += [f for n, gpu in gpus.items() for f in judge_gpus(n, gpu, config, slots[n])]
    if not context.quick:
        findings += judge_clocks(clock_skews(agents))
    return findings


def judge_versions(facts: Mapping[str, HostFacts]) -> list[Finding]:
    """Judge host.versions: one finding for each version that differs on a node."""
    findings: list[Finding] = []
    for name in sorted({name for fact in facts.values() for name in fact.versions}):
        values = {node: fact.versions.get(name, NONE) for node, fact in facts.items()}
        usual = _most_common(values)
        pip = f"pip uninstall {name}" if usual == NONE else f"pip install {name}=={usual}"
        advice = f"{pip} on that node, or use one container image on all nodes"
        advice = VERSION_ADVICE.get(name, advice).format(usual=usual)
        judged = warn if name == "driver" else fail
        for node, evidence in differing(f"{name} ", values).items():
            findings.append(judged("host.versions", node, evidence, advice))
    first, *_ = facts.values()
    each = ", ".join(f"{name} {version}" for name, version in first.versions.items())
    return findings or [ok("host.versions", "all", each)]


def judge_communication(facts: Mapping[str, HostFacts]) -> list[Finding]:
    """Judge host.communication_variables: one finding for each that differs on a node."""
    check = "host.communication_variables"
    findings: list[Finding] = []
    every = {name for fact in facts.values() for name in fact.environment}
    names = sorted(name for name in every if COMMUNICATION.fullmatch(name))
    for name in names:
        values = {node: fact.environment.get(name, "(unset)") for node, fact in facts.items()}
        advice = f"Set {name} the same on all nodes before `ray start`, or unset it everywhere"
        for node, evidence in differing(f"{name}=", values).items():
            if OF_THE_NODE.fullmatch(name):
                findings.append(ok(check, node, f"{evidence}: may differ between nodes"))
            else:
                findings.append(fail(check, node, f"{evidence}: NCCL and gloo may hang", advice))
    first, *_ = facts.values()
    each = ", ".join(f"{name}={first.environment.get(name)}" for name in names)
    return findings or [ok(check, "all", each or "none is set")]


def differing(name: str, values: Mapping[str, str]) -> dict[str, str]:
    """Return a text for each node whose value is not the most common one."""
    usual = _most_common(values)
    others = [node for node, value in values.items() if value == usual]
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    return {
        node: f"{name}{value} here, {name}{usual} on {others[0]}{more}"
        for node, value in values.items()
        if value != usual
    }


def _most_common(values: Mapping[str, str]) -> str:
    """Return the most common value; of several, the first node's, if it is one of them."""
    first, counts = next(iter(values.values())), Counter(values.values())
    return max(counts, key=lambda value: (counts[value], value == first))


def clock_skews(agents: NodeProbes) -> dict[str, float]:
    """Measure a lower bound of each node's clock skew to this node, in seconds; + is ahead.

    A probe reads its clock between call and return, so any value outside of these is skew.
    """
    skews: dict[str, float] = {}
    for _ in range(CLOCK_ROUNDS):
        before = time.time()
        answers = call_all(agents, time.time)
        after = time.time()
        for node, answer in answers.items():
            if not answer.error:
                skew = max(0.0, answer.value - after) + min(0.0, answer.value - before)
                skews[node] = max(skews.get(node, 0.0), skew, key=abs)
    return skews


def judge_clocks(skews: Mapping[str, float]) -> list[Finding]:
    """Judge host.clock from the skews of `clock_skews`."""
    if len(skews) <= 1:
        return [skipped("host.clock", "all", "there is one node")]
    findings = []
    for node, skew in skews.items():
        side = "ahead of" if skew > 0 else "behind"
        evidence = f"its clock is {abs(skew):.1f} s {side} the driver's; certificates depend on it"
        if verdict := severity(abs(skew) > WRONG_CLOCK_S, abs(skew) > ODD_CLOCK_S):
            findings.append(
                Finding("host.clock", node, verdict, evidence, "chronyc makestep there")
            )
    worst = max(map(abs, skews.values()))
    passed = f"{len(skews)} clocks, at least {worst:.3f} s apart"
    return findings or [ok("host.clock", "all", passed)]
