"""First stage: each node by itself, and what has to be equal on all.

host_facts, host_cgroup, host_gpus              what a node says
host_judgements, host_devices, host_variables   what that means for a run
host_nodes                                      the nodes against each other
"""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from hybridrl.config.choices import Accelerator
from hybridrl.controller.ray.node_probes import NodeProbes, ProbeResult, call_all
from hybridrl.doctor.findings import Finding, fail
from hybridrl.doctor.host.devices import judge_allocator, judge_visible
from hybridrl.doctor.host.facts import environment, host_facts, keeps_output_back
from hybridrl.doctor.host.gpus import gpu_facts, judge_gpus
from hybridrl.doctor.host.judgements import judge_clocks, judge_host, judge_terminal
from hybridrl.doctor.host.nodes import judge_communication, judge_versions
from hybridrl.doctor.host.variables import judge_variables
from hybridrl.doctor.stages import Case

GPUS_TIMEOUT_S = 120.0
CLOCK_ROUNDS = 3


def check(case: Case) -> list[Finding]:
    """All checks host.*; `case.quick` leaves out clocks and, of a run on CPUs, GPUs."""
    facts, found = heard("host.limits", call_all(case.agents, host_facts))
    if not facts:
        return found
    found += judge_host(facts, case.config, case.slots)
    driver = case.agents.nodes[0]
    found.append(judge_terminal(driver, environment(), held_back=keeps_output_back()))
    for node, fact in facts.items():
        found.append(judge_visible(node, fact.environment, fact.gpus, case.config))
        found.append(judge_allocator(node, fact.environment, case.config))
    found += judge_variables(facts, environment(), case.config)
    found += judge_versions(facts)
    of_ranks = {node: fact for node, fact in facts.items() if case.slots[node]}
    found += judge_communication(of_ranks or facts)
    if not case.quick:
        return [*found, *_gpus(case), *judge_clocks(clock_skews(case.agents))]
    on_gpu = case.config.hardware.accelerator is Accelerator.gpu
    return [*found, *_gpus(case)] if on_gpu else found


def _gpus(case: Case) -> Iterator[Finding]:
    """host.gpus; `case.quick` does not ask how fast they are."""
    answers = call_all(case.agents, gpu_facts, not case.quick, timeout_s=GPUS_TIMEOUT_S)
    facts, silent = heard("host.gpus", answers)
    yield from silent
    for node, fact in facts.items():
        yield from judge_gpus(node, fact, case.config, case.slots[node])


def heard(check: str, answers: Mapping[str, ProbeResult]) -> tuple[dict[str, Any], list[Finding]]:
    """What nodes answered, and a failure of `check` for each that did not."""
    values = {node: answer.value for node, answer in answers.items() if not answer.error}
    silent = [
        fail(check, node, f"the node does not answer: {answer.error}", _advice(node))
        for node, answer in answers.items()
        if answer.error
    ]
    return values, silent


def clock_skews(agents: NodeProbes) -> dict[str, float]:
    """Seconds by which each node's clock differs at least from this one's; + is ahead.

    A node reads its clock between a call and its return, so it lies between these two times: what
    lies outside is skew, however long the way takes.
    """
    skews: dict[str, float] = {}
    for _ in range(CLOCK_ROUNDS):
        before = time.time()
        answers = call_all(agents, time.time)
        after = time.time()
        for node, answer in answers.items():
            if answer.error:
                continue
            skew = max(0.0, answer.value - after) + min(0.0, answer.value - before)
            skews[node] = max(skews.get(node, 0.0), skew, key=abs)
    return skews


def _advice(node: str) -> str:
    return (
        f"Look at that node (ssh {node}: is it up, is its disk full?) and at the logs of the "
        f"process there: Ray's in /tmp/ray/session_latest/logs"
    )
