"""Check network.interfaces: the interfaces of NCCL and gloo, and connections to them.

Peers connect to the interface's own address, which may differ from Ray's.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from hybridrl.doctor.findings import Finding, Verdict, fail, ok, warn
from hybridrl.doctor.network.nodes import Choice, NodeView, choices_of, nccl_choice
from hybridrl.doctor.network.ports import Attempt, shortened

CHECK = "network.interfaces"


def choices(views: Mapping[str, NodeView], addresses: Mapping[str, str]) -> dict[str, list[Choice]]:
    """Return the interfaces to connect to: network.ports covers the nodes' own addresses."""
    return {
        node: [
            choice
            for choice in choices_of(node, view)
            if len(views) > 1 and choice.address not in ("", addresses[node])
        ]
        for node, view in views.items()
    }


def judge(
    views: Mapping[str, NodeView],
    attempts: Sequence[Attempt] = (),
    addresses: Mapping[str, str] | None = None,
) -> list[Finding]:
    """Judge the interfaces of all nodes, and the attempts to connect to `choices`."""
    found = []
    for node, view in views.items():
        absent = [choice for choice in choices_of(node, view) if not choice.address]
        for name in dict.fromkeys(one.variable for one in absent if one.value is not None):
            evidence = f"{name}={view.variables[name]} names no interface of this node; it has "
            evidence += view.describe()
            outward = next(iter(view.outward), "eth0")
            advice = f"Unset {name}, or export {name}={outward} on this node before `ray start`."
            found.append(fail(CHECK, node, evidence, advice))
    of_choices = [attempt for attempt in attempts if attempt.target.choice is not None]
    found += _judge_attempts(of_choices, views, addresses or {})
    if found:
        return found
    used = [f"NCCL uses {', '.join(f'{n} {nccl_choice(view)}' for n, view in views.items())}"]
    if gloo := [f"{n} {name}" for n, view in views.items() for name in view.gloo_names]:
        used.append(f"gloo uses {', '.join(gloo)}")
    if of_choices:
        used.append(f"{len(of_choices)} connections to interfaces of their own")
    used += [f"{node}: {view.describe()}" for node, view in views.items()]
    return [ok(CHECK, "all", "; ".join(used))]


def _judge_attempts(
    attempts: Sequence[Attempt], views: Mapping[str, NodeView], addresses: Mapping[str, str]
) -> list[Finding]:
    """Return a finding for each unreachable choice, or for each pair if some nodes reach it."""
    by_choice: dict[Choice, list[Attempt]] = defaultdict(list)
    for attempt in sorted(attempts, key=lambda one: [*views].index(one.target.node)):
        assert attempt.target.choice is not None
        by_choice[attempt.target.choice].append(attempt)
    found = []
    for choice, those in by_choice.items():
        broken = [attempt for attempt in those if attempt.problem]
        groups = {f"{a.source} -> {choice.node}": [a] for a in broken}
        if len(broken) == len(those):
            groups = {choice.node: broken}
        view, known_by = views[choice.node], addresses[choice.node]
        found += [
            _unreached(choice, about, group, view, known_by) for about, group in groups.items()
        ]
    return shortened(sorted(found, key=lambda finding: finding.verdict is not Verdict.fail))


def _unreached(
    choice: Choice, about: str, attempts: Sequence[Attempt], view: NodeView, known_by: str
) -> Finding:
    """Return a failure if a variable names the interface, else a warning."""
    sources: dict[str, list[str]] = defaultdict(list)
    for attempt in attempts:
        sources[attempt.problem].append(attempt.source)
    tried = "; ".join(f"from {', '.join(nodes)}: {problem}" for problem, nodes in sources.items())
    leading = view.interface_of(known_by)
    advice = f"Make {choice.address} reachable (`ip route get`; docker run --network=host)"
    if leading not in (None, choice.interface):
        advice = f"On {choice.node}, export {choice.variable}={leading} before `ray start`, as the "
        advice += f"others know the node by its address {known_by}"
    reason = f"{choice.variable}={choice.value}"
    if choice.value is None:
        reason = f"NCCL uses {choice.interface} by default"
    evidence = (
        f"{reason}: {choice.interface} of {choice.node} is not reached at {choice.address} "
        f"{tried}; it has {view.describe()}"
    )
    return (warn if choice.value is None else fail)(CHECK, about, evidence, advice)
