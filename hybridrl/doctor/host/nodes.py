"""What has to be equal on all nodes: versions, and variables that both ends of a wire go by."""

import re
from collections import Counter
from collections.abc import Mapping

from hybridrl.doctor.findings import Finding, fail, ok, warn
from hybridrl.doctor.host.facts import HostFacts

COMMUNICATION = re.compile(r"(NCCL|RCCL|GLOO|FI|UCX)_\w+")
# Names of what a node has, or where it writes: they may differ where the nodes do.
OF_THE_NODE = re.compile(
    r"\w+_(IFNAME|HCA|GID_INDEX|FILE|DEBUG|SUBSYS|DEVICES?|LEVEL)|NCCL_DEBUG\w*|FI_LOG_\w+|UCX_LOG_\w+"
)
# The version of what is not there.
NONE = "none"


def judge_versions(facts: Mapping[str, HostFacts]) -> list[Finding]:
    """host.versions: a finding for each node and what is different on it."""
    check = "host.versions"
    found: list[Finding] = []
    names = sorted({name for fact in facts.values() for name in fact.versions})
    for name in names:
        values = {node: fact.versions.get(name, NONE) for node, fact in facts.items()}
        for node, evidence in odd_ones(name, values).items():
            verdict = warn if name == "driver" else fail
            advice = _version_advice(name, _usual(values))
            found.append(verdict(check, node, evidence, advice))
    if not found:
        (versions,) = {tuple(fact.versions.items()) for fact in facts.values()}
        found.append(ok(check, "all", ", ".join(f"{name} {value}" for name, value in versions)))
    return found


def judge_communication(facts: Mapping[str, HostFacts]) -> list[Finding]:
    """host.communication_variables: a finding for each node and variable that differs there."""
    check = "host.communication_variables"
    found: list[Finding] = []
    every = {name for fact in facts.values() for name in fact.environment}
    names = sorted(name for name in every if COMMUNICATION.fullmatch(name))
    for name in names:
        values = {node: fact.environment.get(name, "(unset)") for node, fact in facts.items()}
        for node, evidence in odd_ones(name, values, "=").items():
            if OF_THE_NODE.fullmatch(name):
                found.append(ok(check, node, f"{evidence}: each node's own"))
                continue
            found.append(
                fail(
                    check,
                    node,
                    f"{evidence}: NCCL and gloo hang or fail where two ends disagree",
                    f"Set {name} the same on all nodes, or nowhere, before `ray start`: in the "
                    f"file that every node's shell or container reads, or by srun --export=ALL",
                )
            )
    if not found:
        values_text = ", ".join(f"{n}={next(iter(facts.values())).environment[n]}" for n in names)
        found.append(ok(check, "all", values_text or "none is set"))
    return found


def odd_ones(name: str, values: Mapping[str, str], sign: str = " ") -> dict[str, str]:
    """The nodes whose value is not that of most nodes, and what differs, as a text.

    Args:
        name: of what has the values.
        values: by node.
        sign: stands between name and value.
    """
    usual = _usual(values)
    like_most = [node for node, value in values.items() if value == usual]
    others = f"on {like_most[0]}"
    if len(like_most) > 1:
        others += f" and {len(like_most) - 1} more"
    return {
        node: f"{name}{sign}{value} here, {name}{sign}{usual} {others}"
        for node, value in values.items()
        if value != usual
    }


def _usual(values: Mapping[str, str]) -> str:
    """The value of most nodes; if none leads, the first node's."""
    first = next(iter(values.values()))
    counts = Counter(values.values())
    return max(counts, key=lambda value: (counts[value], value == first))


def _version_advice(name: str, usual: str) -> str:
    if name == "driver":
        return "Install the same driver on all nodes: GPUs of one job should not differ in it"
    if name == "python":
        return f"Use python {usual} on all nodes (Ray refuses to mix them)"
    if name == "hybridrl sources":
        return (
            "Bring the same checkout to all nodes (git pull; pip install -e .), or keep it in a "
            "shared folder"
        )
    command = f"pip uninstall {name}" if usual == NONE else f"pip install {name}=={usual}"
    return f"{command} on that node, or use the same container image on all"
