"""Host stage: each node alone, and differences between nodes."""

from hybridrl.doctor.context import CheckContext
from hybridrl.doctor.findings import Finding
from hybridrl.doctor.gather import gather
from hybridrl.doctor.host.cluster import (
    clock_skews,
    judge_clocks,
    judge_communication,
    judge_versions,
)
from hybridrl.doctor.host.facts import buffers_output, environment, host_facts
from hybridrl.doctor.host.gpus import gpu_facts, judge_gpus
from hybridrl.doctor.host.limits import judge_limits_of_nodes
from hybridrl.doctor.host.variables import (
    judge_allocator,
    judge_terminal,
    judge_variables,
    judge_visible,
)

GPUS_TIMEOUT_S = 120.0


def check(context: CheckContext) -> list[Finding]:
    """Make all checks host.*; `context.quick` skips clocks and, of a run on CPUs, GPUs."""
    config, agents, slots = context.config, context.agents, context.slots
    facts, found = gather(agents, "host.limits", host_facts)
    if not facts:
        return found
    found += judge_limits_of_nodes(facts, config, slots)
    found.append(judge_terminal(agents.nodes[0], environment(), buffered=buffers_output()))
    for node, fact in facts.items():
        found.append(judge_visible(node, fact.environment, fact.gpus, config))
        found.append(judge_allocator(node, fact.environment, config))
    found += judge_variables(facts, environment(), config)
    found += judge_versions(facts)
    found += judge_communication({n: f for n, f in facts.items() if slots[n]} or facts)
    if not context.quick or context.on_gpu:
        probe = (gpu_facts, not context.quick)
        gpus, silent = gather(agents, "host.gpus", *probe, timeout_s=GPUS_TIMEOUT_S)
        found += silent
        found += [f for n, gpu in gpus.items() for f in judge_gpus(n, gpu, config, slots[n])]
    if not context.quick:
        found += judge_clocks(clock_skews(agents))
    return found
