"""What the stage of Ray makes of what the nodes and the head say."""

import re
from collections.abc import Mapping, Sequence

from hybridrl.config.checks.installation import ray_advice, ray_problem
from hybridrl.controller.ray.cluster_view import ClusterView, HeadReply
from hybridrl.controller.ray.head import Connection
from hybridrl.doctor.findings import Finding, fail, ok, skipped, warn
from hybridrl.doctor.network.nodes import is_loopback
from hybridrl.doctor.ray.facts import RayFacts

START = "`ray start --head --node-ip-address=<its address> --port={port}`"


def judge_versions(facts: Mapping[str, RayFacts]) -> list[Finding]:
    """ray.version: what is installed on each node against what this package asks for."""
    findings = []
    for node, fact in facts.items():
        if problem := ray_problem(fact.version):
            advice = f"{ray_advice()} on {node}, then restart Ray there (ray stop)."
            findings.append(fail("ray.version", node, problem, advice))
        else:
            findings.append(ok("ray.version", node, f"Ray {fact.version}"))
    return findings


def judge_tokens(facts: Mapping[str, RayFacts], *, joined: bool) -> list[Finding]:
    """ray.token: the same mode and token on all nodes.

    Where the mode is not set, `ray start --head` asks for a token that it finds, and whoever joins
    by an address sends none, not even the same one.

    Args:
        facts: by node.
        joined: whether this process is in the nodes' cluster, which has settled what it asks for.
    """
    kinds = {node: _auth(fact) for node, fact in facts.items()}
    without = [node for node, (mode, token) in kinds.items() if mode == "token" and not token]
    if without:
        what = f"RAY_AUTH_MODE=token and no token on {', '.join(without)}"
        return [fail("ray.token", "all", what, _token_advice())]
    if len(set(kinds.values())) > 1:
        each = ", ".join(f"{node}: {_kind(fact)}" for node, fact in facts.items())
        return [fail("ray.token", "all", f"the nodes differ: {each}", _token_advice())]
    what = ", ".join(sorted({_kind(fact) for fact in facts.values()}))
    idle = [node for node, fact in facts.items() if fact.auth_mode is None and fact.token]
    if idle:
        what += f", and a token on {', '.join(idle)}"
    if idle and len(facts) > 1 and not joined:
        what += (
            ": a head that `ray start --head` starts there asks for it, while nodes and runs that "
            "join by its address send none and are refused"
        )
        return [fail("ray.token", "all", what, _token_advice())]
    if not idle and not any(token for _, token in kinds.values()):
        what += ": no token"
    return [ok("ray.token", "all", what)] if facts else []


def judge_reachable(facts: Mapping[str, RayFacts], address: str, *, several: bool) -> list[Finding]:
    """ray.reachable and ray.loopback: connections of every node to the head.

    Args:
        facts: by node.
        address: RAY_ADDRESS.
        several: whether other nodes have yet to reach the head.
    """
    host, _, port = address.rpartition(":")
    listeners = {node: fact.listeners for node, fact in facts.items() if fact.listeners}
    findings = [_judge_loopback(host, port, listeners)] if several else []
    if not several:
        findings = [ok("ray.loopback", "all", "no other node has to reach the head")]
    unreached = [node for node, fact in facts.items() if fact.connection.error]
    for node in unreached:
        error = facts[node].connection.error
        what = f"{node} -> {address}: {error}"
        findings.append(fail("ray.reachable", node, what, _unreached_advice(error, port)))
    if facts and not unreached:
        longest = max(fact.connection.seconds for fact in facts.values())
        what = f"{len(facts)} node(s) connect to {address} within {1e3 * longest:.1f} ms"
        findings.append(ok("ray.reachable", "all", what))
    return findings


def judge_view(view: ClusterView, address: str, wanted: int) -> list[Finding]:
    """ray.port, ray.token and ray.nodes: what the head said."""
    if view.reply is HeadReply.other_token:
        what = f"the cluster at {address} refuses this node: {view.detail}"
        token = fail("ray.token", "all", what, _token_advice())
        port = ok("ray.port", "all", f"Ray answers at {address}")
        return [port, token, *skip_all(("ray.nodes",), "the head refuses the token")]
    if view.reply is HeadReply.none:
        what = f"{address} speaks gRPC, but not as Ray's head: {view.detail}"
        advice = f"See `ray status --address={address}`; restart the head: {START}."
        port_number = address.rpartition(":")[2]
        failed = fail("ray.port", "all", what, advice.format(port=port_number))
        return [failed, *skip_all(("ray.nodes",), "no Ray answers")]
    version = f"Ray {view.ray_version}, Python {view.python_version}" if view.ray_version else "Ray"
    return [
        ok("ray.port", "all", f"{version} at {address}"),
        *_judge_registered(view, address, wanted),
        *_judge_nodes(view, address, wanted),
    ]


def _judge_registered(view: ClusterView, address: str, wanted: int) -> list[Finding]:
    """ray.loopback: nodes that told the head an address which leads the others to themselves."""
    alive = [node for node in view.nodes if node.alive]
    on_one_machine = len({node.host for node in alive}) == 1 and len(alive) >= wanted
    if wanted == 1 or on_one_machine:
        return []
    return [
        fail(
            "ray.loopback",
            node.host,
            f"{node.host} is known in the cluster by {node.address}: others reach themselves there",
            _loopback_advice(address.rpartition(":")[2]),
        )
        for node in alive
        if is_loopback(node.address)
    ]


def _loopback_advice(port: str) -> str:
    return (
        "ray stop there, and start it on an address that the others reach: "
        f"{START.format(port=port)}, on other nodes --address in place of --head and --port. The "
        "address is often taken from a line with 127.0.1.1 in /etc/hosts."
    )


def alive_nodes(view: ClusterView) -> int:
    """How many nodes the cluster has."""
    return sum(node.alive for node in view.nodes)


def _judge_nodes(view: ClusterView, address: str, wanted: int) -> list[Finding]:
    alive = [f"{node.host} ({node.address})" for node in view.nodes if node.alive]
    back = {(node.host, node.address) for node in view.nodes if node.alive}
    dead = [
        f"{node.host} ({node.address}){f': {node.reason}' if node.reason else ''}"
        for node in view.nodes
        if not node.alive and (node.host, node.address) not in back
    ]
    gone = f"; dead: {'; '.join(dead)}" if dead else ""
    what = f"{len(alive)} of cluster.nodes={wanted} alive: {', '.join(alive) or 'none'}{gone}"
    advice = (
        f"On each node that is missing: ray start --address={address} --node-ip-address=<its "
        "address>, with the head's RAY_AUTH_TOKEN; `ray status` then counts it."
    )
    if len(alive) < wanted:
        return [fail("ray.nodes", "all", what, f"{advice} Or set cluster.nodes={len(alive)}.")]
    if dead:
        return [warn("ray.nodes", "all", what, f"If they were meant to take part: {advice}")]
    return [ok("ray.nodes", "all", what)]


def _judge_loopback(host: str, port: str, listeners: Mapping[str, Sequence[str]]) -> Finding:
    advice = _loopback_advice(port)
    if host == "localhost" or (_is_address(host) and is_loopback(host)):
        what = f"RAY_ADDRESS={host}:{port} leads every node to itself, and there are several"
        return fail("ray.loopback", "all", what, advice)
    for node, places in listeners.items():
        if all(is_loopback(place) for place in places):
            what = f"on {node}, port {port} listens on {', '.join(places)} alone"
            return fail("ray.loopback", node, what, advice)
    if not listeners:
        return skipped("ray.loopback", "all", f"none of these nodes listens on port {port}")
    where = "; ".join(f"{node}: {', '.join(places)}" for node, places in listeners.items())
    return ok("ray.loopback", "all", f"port {port} listens on {where}")


def judge_stranger(address: str, connection: Connection, facts: Mapping[str, RayFacts]) -> Finding:
    """ray.port: what answers is no Ray."""
    holders = sorted({name for fact in facts.values() for name in fact.holders})
    who = f", held by {', '.join(holders)}" if holders else ""
    said = f"says {connection.said!r}" if connection.said else "says nothing"
    port = address.rpartition(":")[2]
    return fail(
        "ray.port",
        "all",
        f"{address} answers but is no Ray: to a gRPC greeting it {said}{who}",
        f"6379 is Redis's port, too: start Ray's head on another (ray start --head --port=6380) "
        f"and set RAY_ADDRESS to it, or end what has it (`ss -ltnp sport = :{port}` on the head).",
    )


def skip_all(checks: Sequence[str], why: str) -> list[Finding]:
    """These checks could not be made, and why."""
    return [skipped(check, "all", why) for check in checks]


def _unreached_advice(error: str, port: str) -> str:
    if "refused" in error:
        return (
            f"On the head, `ss -ltn sport = :{port}` says what listens there. Nothing: start it, "
            f"{START.format(port=port)}. 127.0.0.1 alone: ray stop, and start it like this. "
            "Otherwise RAY_ADDRESS names another machine."
        )
    return (
        f"Open TCP port {port} of the head, and Ray's other ports, for this node in firewalls and "
        "security groups; `ip route get <head>` says whether there is a route. RAY_ADDRESS must be "
        "the head's address as this node knows it."
    )


def _token_advice() -> str:
    return (
        "Give all nodes one token before `ray start`, and the run the same: export "
        "RAY_AUTH_MODE=token RAY_AUTH_TOKEN=<the word of 64 characters that the head has; `cat "
        "~/.ray/auth_token` there shows one that Ray made by itself>. Without tokens: export "
        "RAY_AUTH_MODE=disabled everywhere. Then `ray stop` and start the nodes again."
    )


def _auth(fact: RayFacts) -> tuple[str, str]:
    """Mode and token with which a node joins a cluster; without the mode it sends none."""
    if fact.auth_mode == "token":
        return "token", fact.token
    return fact.auth_mode or "disabled", ""


def _kind(fact: RayFacts) -> str:
    if fact.auth_mode == "token":
        return f"token with SHA-256 {fact.token}..."
    return "RAY_AUTH_MODE unset" if fact.auth_mode is None else f"RAY_AUTH_MODE={fact.auth_mode}"


def _is_address(host: str) -> bool:
    return re.fullmatch(r"[\d.]+|\[?[\da-fA-F:]+\]?", host) is not None
