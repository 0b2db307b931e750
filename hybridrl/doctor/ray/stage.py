"""Ray stage: versions and tokens, the way to the head, and its cluster."""

from hybridrl.config.checks.installation import ray_problem, ray_version
from hybridrl.controller.ray.cluster_view import joined_view, query_head
from hybridrl.controller.ray.head import head_place, ray_address
from hybridrl.controller.ray.node_probes import NodeProbes
from hybridrl.doctor.context import CheckContext
from hybridrl.doctor.findings import Finding, fail, ok, skipped
from hybridrl.doctor.gather import gather
from hybridrl.doctor.ray.facts import ray_facts
from hybridrl.doctor.ray.rules import (
    alive_nodes,
    judge_reachable,
    judge_stranger,
    judge_tokens,
    judge_versions,
    judge_view,
)

ASK_S = 10.0
FACTS_S = 20.0
OF_HEAD = ("ray.reachable", "ray.loopback", "ray.port", "ray.nodes")


def check(context: CheckContext) -> list[Finding]:
    """Make all checks ray.*."""
    return examine(context.agents, context.config.cluster.nodes)


def examine(agents: NodeProbes, wanted: int) -> list[Finding]:
    """Make all checks ray.* for a run on `wanted` nodes."""
    address = ray_address()
    joined = None if address is None else joined_view()
    place = None if address is None else head_place(address)
    facts, found = gather(agents, "ray.reachable", ray_facts, place, timeout_s=FACTS_S)
    found += judge_versions(facts) + judge_tokens(facts, joined=joined is not None)
    unfit = ray_problem(ray_version())
    if address is None:
        return found + _without_address(len(agents.nodes), wanted)
    if place is None and unfit:
        return found + _skip(OF_HEAD, f"RAY_ADDRESS={address}, and {unfit} here")
    if place is None and joined is None:
        evidence = f"RAY_ADDRESS={address} led to no cluster that this process could join"
        advice = "Set RAY_ADDRESS=<address of the head>:6379, and start the doctor again."
        return [*found, fail("ray.reachable", "all", evidence, advice)]
    if place is None and joined is not None:
        evidence = f"RAY_ADDRESS={address} has been joined"
        found += [ok("ray.reachable", "all", evidence), skipped("ray.loopback", "all", evidence)]
        return found + judge_view(joined, address, wanted)
    several = max(wanted, len(facts)) > 1 and (joined is None or alive_nodes(joined) < wanted)
    found += judge_reachable(facts, address, several=several)
    if not facts or any(fact.connection.error for fact in facts.values()):
        return found + _skip(OF_HEAD[2:], "the head is not reached")
    strangers = [fact.connection for fact in facts.values() if not fact.connection.is_grpc]
    if strangers:
        found.append(judge_stranger(address, strangers[0], facts))
        return found + _skip(OF_HEAD[3:], "no Ray")
    if unfit:
        return found + _skip(OF_HEAD[2:], f"{unfit} here")
    return found + judge_view(joined or query_head(address, ASK_S), address, wanted)


def _skip(checks: tuple[str, ...], why: str) -> list[Finding]:
    return [skipped(check, "all", why) for check in checks]


def _without_address(seen: int, wanted: int) -> list[Finding]:
    """Return the findings before Ray is up, or of a run that starts its own Ray."""
    if seen < wanted:
        evidence = f"{seen} of cluster.nodes={wanted} examined: RAY_ADDRESS is not set"
        advice = (
            "Start Ray on all nodes and set RAY_ADDRESS=<address of the head>:6379, or start the "
            f"doctor on each node with --join; or set cluster.nodes={seen}."
        )
        failed = fail("ray.nodes", "all", evidence, advice)
        return [*_skip(OF_HEAD[:3], "RAY_ADDRESS is not set"), failed]
    starts = "the run starts a Ray of its own, for this machine only"
    return _skip(OF_HEAD, f"RAY_ADDRESS is not set: {starts if seen == 1 else 'no Ray yet'}")
