"""The stage of Ray: whether its head can be reached, is Ray, and takes this run's token."""

from hybridrl.config.checks.installation import ray_problem, ray_version
from hybridrl.controller.ray.cluster_view import ClusterView, joined_view, query_head
from hybridrl.controller.ray.head import head_place, ray_address
from hybridrl.controller.ray.node_probes import NodeProbes, call_all
from hybridrl.doctor.findings import Finding, fail, ok
from hybridrl.doctor.host.stage import heard
from hybridrl.doctor.ray.facts import ray_facts
from hybridrl.doctor.ray.judgements import (
    alive_nodes,
    judge_reachable,
    judge_stranger,
    judge_tokens,
    judge_versions,
    judge_view,
    skip_all,
)
from hybridrl.doctor.stages import Case

ASK_S = 10.0
FACTS_S = 20.0


def check(case: Case) -> list[Finding]:
    """Findings of the stage ray."""
    return examine(case.agents, case.config.cluster.nodes)


def examine(agents: NodeProbes, wanted: int) -> list[Finding]:
    """As `check`.

    Args:
        agents: the nodes.
        wanted: cluster.nodes.
    """
    address = ray_address()
    joined = None if address is None else joined_view()
    place = None if address is None else head_place(address)
    facts, findings = heard("ray.reachable", call_all(agents, ray_facts, place, timeout_s=FACTS_S))
    findings += judge_versions(facts) + judge_tokens(facts, joined=joined is not None)
    if address is None:
        return findings + _without_address(agents, wanted)
    unfit = ray_problem(ray_version())
    if place is None and unfit:
        checks = ("ray.reachable", "ray.loopback", "ray.port", "ray.nodes")
        return findings + skip_all(checks, f"RAY_ADDRESS={address}, and {unfit} here")
    if place is None:
        return findings + _with_address_that_ray_finds(address, wanted, joined)
    several = max(wanted, len(facts)) > 1 and (joined is None or alive_nodes(joined) < wanted)
    findings += judge_reachable(facts, address, several=several)
    if not facts or any(fact.connection.error for fact in facts.values()):
        return findings + skip_all(("ray.port", "ray.nodes"), "the head is not reached")
    strangers = [fact.connection for fact in facts.values() if not fact.connection.is_grpc]
    if strangers:
        return [
            *findings,
            judge_stranger(address, strangers[0], facts),
            *skip_all(("ray.nodes",), "no Ray"),
        ]
    if unfit:
        return findings + skip_all(("ray.port", "ray.nodes"), f"{unfit} here")
    view = joined or query_head(address, ASK_S)
    return findings + judge_view(view, address, wanted)


def _without_address(agents: NodeProbes, wanted: int) -> list[Finding]:
    """Ray is not up yet, or the run starts its own."""
    checks = ("ray.reachable", "ray.loopback", "ray.port")
    seen = len(agents.nodes)
    if seen < wanted:
        what = f"{seen} of cluster.nodes={wanted} looked at: RAY_ADDRESS is not set"
        advice = (
            "Start Ray on all nodes and set RAY_ADDRESS=<address of the head>:6379, or start the "
            f"doctor on each node with --join; or set cluster.nodes={seen}."
        )
        why = "RAY_ADDRESS is not set"
        return [*skip_all(checks, why), fail("ray.nodes", "all", what, advice)]
    if seen == 1:
        why = "RAY_ADDRESS is not set: the run starts a Ray of its own, for this machine alone"
    else:
        why = "RAY_ADDRESS is not set: there is no Ray yet"
    return skip_all((*checks, "ray.nodes"), why)


def _with_address_that_ray_finds(
    address: str, wanted: int, joined: ClusterView | None
) -> list[Finding]:
    """RAY_ADDRESS=auto: Ray looks for a head on this machine."""
    if joined is None:
        what = f"RAY_ADDRESS={address} led to no cluster that this process could join"
        advice = "Set RAY_ADDRESS=<address of the head>:6379, and start the doctor again."
        return [fail("ray.reachable", "all", what, advice)]
    why = f"RAY_ADDRESS={address} has been joined"
    return [
        ok("ray.reachable", "all", why),
        *skip_all(("ray.loopback",), why),
        *judge_view(joined, address, wanted),
    ]
