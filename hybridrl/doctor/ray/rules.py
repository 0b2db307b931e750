"""Rules for the facts of the nodes and the replies of the head."""

import re
from collections.abc import Mapping, Sequence

from hybridrl.config.checks.installation import RAY_ADVICE, ray_problem
from hybridrl.controller.ray.cluster_view import ClusterView, HeadReply
from hybridrl.controller.ray.head import Connection
from hybridrl.doctor.findings import Finding, Rule, fail, fails_if, first, ok, skipped, warns_if
from hybridrl.doctor.network.nodes import is_loopback
from hybridrl.doctor.ray.facts import RayFacts

START = "`ray start --head --node-ip-address=<its address> --port={port}`"
TOKEN_ADVICE = (
    "Set one token on all nodes before `ray start`, and for the run: export RAY_AUTH_MODE=token "
    "RAY_AUTH_TOKEN=<the 64 characters of the head; `cat ~/.ray/auth_token` there prints a token "
    "that Ray made>. Without tokens: export RAY_AUTH_MODE=disabled everywhere. Then `ray stop` and "
    "restart the nodes."
)
LOOPBACK_ADVICE = (
    f"ray stop there, and start it on an address that the others reach: {START}, on other nodes "
    "--address in place of --head and --port. The loopback address often comes from a line with "
    "127.0.1.1 in /etc/hosts."
)


def judge_versions(facts: Mapping[str, RayFacts]) -> list[Finding]:
    """Judge ray.version: the installed Ray of each node against the required one."""
    found = []
    for node, fact in facts.items():
        problem = ray_problem(fact.version)
        advice = f"{RAY_ADVICE} on {node}, then restart Ray there (ray stop)."
        rules: list[Rule] = [(fails_if(bool(problem)), problem or "", advice)]
        found.append(first("ray.version", node, rules, f"Ray {fact.version}"))
    return found


def judge_tokens(facts: Mapping[str, RayFacts], *, joined: bool) -> list[Finding]:
    """Judge ray.token: the same mode and token on all nodes.

    Without RAY_AUTH_MODE, `ray start --head` requires a token that it finds, but a node that joins
    by address sends none. `joined`: this process is already in the cluster.
    """
    if not facts:
        return []
    effective = {node: _effective_auth(fact) for node, fact in facts.items()}
    without = [node for node, (mode, token) in effective.items() if mode == "token" and not token]
    unused = [node for node, fact in facts.items() if fact.auth_mode is None and fact.token]
    kinds = ", ".join(sorted({_kind(fact) for fact in facts.values()}))
    if unused:
        kinds += f", and a token on {', '.join(unused)}"
    elif not any(token for _, token in effective.values()):
        kinds += ": no token"
    each = ", ".join(f"{node}: {_kind(fact)}" for node, fact in facts.items())
    rules: list[Rule] = [
        (
            fails_if(bool(without)),
            f"RAY_AUTH_MODE=token and no token on {', '.join(without)}",
            TOKEN_ADVICE,
        ),
        (fails_if(len(set(effective.values())) > 1), f"the nodes differ: {each}", TOKEN_ADVICE),
        (
            fails_if(bool(unused) and len(facts) > 1 and not joined),
            f"{kinds}: a head that `ray start --head` starts there requires it, but nodes and runs "
            "that join by its address send none and are refused",
            TOKEN_ADVICE,
        ),
    ]
    return [first("ray.token", "all", rules, kinds)]


def _effective_auth(fact: RayFacts) -> tuple[str, str]:
    """Return mode and token that a node uses to join; without the mode it sends no token."""
    mode = fact.auth_mode or "disabled"
    return mode, fact.token if mode == "token" else ""


def _kind(fact: RayFacts) -> str:
    if fact.auth_mode == "token":
        return f"token with SHA-256 {fact.token}..."
    return "RAY_AUTH_MODE unset" if fact.auth_mode is None else f"RAY_AUTH_MODE={fact.auth_mode}"


def judge_reachable(facts: Mapping[str, RayFacts], address: str, *, several: bool) -> list[Finding]:
    """Judge ray.reachable and ray.loopback: connections to the head from each node.

    `several`: nodes other than the head must still connect.
    """
    host, _, port = address.rpartition(":")
    listeners = {node: fact.listeners for node, fact in facts.items() if fact.listeners}
    found = [ok("ray.loopback", "all", "no other node has to reach the head")]
    if several:
        found = [_judge_loopback(host, port, listeners)]
    errors = {node: fact.connection.error for node, fact in facts.items() if fact.connection.error}
    for node, error in errors.items():
        evidence = f"{node} -> {address}: {error}"
        advice = (
            f"On the head, `ss -ltn sport = :{port}` shows who listens. Nothing: start it, "
            f"{START.format(port=port)}. Only 127.0.0.1: ray stop, and start it like this. "
            "Otherwise RAY_ADDRESS names another machine."
            if "refused" in error
            else f"Open TCP port {port} of the head, and Ray's other ports, for this node in "
            "firewalls and security groups; check the route with `ip route get <head>`. "
            "RAY_ADDRESS must be the head's address as seen by this node."
        )
        found.append(fail("ray.reachable", node, evidence, advice))
    if facts and not errors:
        longest = max(fact.connection.seconds for fact in facts.values())
        evidence = f"{len(facts)} node(s) connect to {address} within {1e3 * longest:.1f} ms"
        found.append(ok("ray.reachable", "all", evidence))
    return found


def _judge_loopback(host: str, port: str, listeners: Mapping[str, Sequence[str]]) -> Finding:
    advice = LOOPBACK_ADVICE.format(port=port)
    is_address = re.fullmatch(r"[\d.]+|\[?[\da-fA-F:]+\]?", host) is not None
    if host == "localhost" or (is_address and is_loopback(host)):
        evidence = f"RAY_ADDRESS={host}:{port} leads every node to itself, and there are several"
        return fail("ray.loopback", "all", evidence, advice)
    for node, addresses in listeners.items():
        if all(map(is_loopback, addresses)):
            evidence = f"on {node}, port {port} listens on {', '.join(addresses)} alone"
            return fail("ray.loopback", node, evidence, advice)
    if not listeners:
        return skipped("ray.loopback", "all", f"none of these nodes listens on port {port}")
    each = "; ".join(f"{node}: {', '.join(addresses)}" for node, addresses in listeners.items())
    return ok("ray.loopback", "all", f"port {port} listens on {each}")


def judge_stranger(address: str, connection: Connection, facts: Mapping[str, RayFacts]) -> Finding:
    """Judge ray.port, held by a server that is not Ray."""
    holders = sorted({name for fact in facts.values() for name in fact.holders})
    who = f", held by {', '.join(holders)}" if holders else ""
    reply = repr(connection.said) if connection.said else "nothing"
    port = address.rpartition(":")[2]
    return fail(
        "ray.port",
        "all",
        f"{address} answers but is no Ray: the reply to a gRPC greeting is {reply}{who}",
        "6379 is Redis's port, too: start Ray's head on another (ray start --head --port=6380) "
        f"and set RAY_ADDRESS to it, or end the server (`ss -ltnp sport = :{port}` on the head).",
    )


def judge_view(view: ClusterView, address: str, wanted: int) -> list[Finding]:
    """Judge ray.port, ray.token, ray.loopback and ray.nodes by the reply of the head."""
    if view.reply is HeadReply.other_token:
        evidence = f"the cluster at {address} refuses this node: {view.detail}"
        return [
            ok("ray.port", "all", f"Ray answers at {address}"),
            fail("ray.token", "all", evidence, TOKEN_ADVICE),
            skipped("ray.nodes", "all", "the head refuses the token"),
        ]
    port = address.rpartition(":")[2]
    if view.reply is HeadReply.none:
        evidence = f"{address} speaks gRPC, but not as Ray's head: {view.detail}"
        advice = f"See `ray status --address={address}`; restart the head: "
        return [
            fail("ray.port", "all", evidence, f"{advice}{START.format(port=port)}."),
            skipped("ray.nodes", "all", "no Ray answers"),
        ]
    version = f"Ray {view.ray_version}, Python {view.python_version}" if view.ray_version else "Ray"
    alive = [node for node in view.nodes if node.alive]
    on_one_machine = len({node.host for node in alive}) == 1 and len(alive) >= wanted
    found = [ok("ray.port", "all", f"{version} at {address}")]
    for node in alive:
        if wanted > 1 and not on_one_machine and is_loopback(node.address):
            evidence = f"{node.host} is known in the cluster by {node.address}, which leads other "
            evidence += "nodes to themselves"
            advice = LOOPBACK_ADVICE.format(port=port)
            found.append(fail("ray.loopback", node.host, evidence, advice))
    return [*found, _judge_nodes(view, address, wanted)]


def alive_nodes(view: ClusterView) -> int:
    """Count the nodes that are alive."""
    return sum(node.alive for node in view.nodes)


def _judge_nodes(view: ClusterView, address: str, wanted: int) -> Finding:
    alive = [f"{node.host} ({node.address})" for node in view.nodes if node.alive]
    dead = [
        f"{name}{f': {node.reason}' if node.reason else ''}"
        for node in view.nodes
        if not node.alive and (name := f"{node.host} ({node.address})") not in alive
    ]
    evidence = f"{len(alive)} of cluster.nodes={wanted} alive: {', '.join(alive) or 'none'}"
    evidence += f"; dead: {'; '.join(dead)}" if dead else ""
    advice = (
        f"On each missing node: ray start --address={address} --node-ip-address=<its address>, "
        "with the head's RAY_AUTH_TOKEN; `ray status` then lists it."
    )
    rules: list[Rule] = [
        (fails_if(len(alive) < wanted), evidence, f"{advice} Or cluster.nodes={len(alive)}."),
        (warns_if(bool(dead)), evidence, f"If the run needs them: {advice}"),
    ]
    return first("ray.nodes", "all", rules, evidence)
