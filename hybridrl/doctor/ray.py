"""Ray stage: versions and tokens, the way to the head, and its cluster. Does not import Ray."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from hybridrl.config.checks.installation import RAY_ADVICE, ray_problem, ray_version
from hybridrl.controller.ray.cluster_view import ClusterView, HeadReply, joined_view, query_head
from hybridrl.controller.ray.head import Connection, connect, head_place, ray_address
from hybridrl.controller.ray.node_probes import NodeProbes
from hybridrl.controller.rendezvous import is_ip
from hybridrl.doctor.findings import Finding, Rule, fail, fails_if, first, ok, skipped, warns_if
from hybridrl.doctor.network.nodes import is_loopback
from hybridrl.doctor.network.server import listening, process_text
from hybridrl.doctor.stages import gather

ASK_S, FACTS_S = 10.0, 20.0
TOKEN_CHARACTERS = 8
OF_HEAD = ("ray.reachable", "ray.loopback", "ray.port", "ray.nodes")
START = "`ray start --head --node-ip-address=<its address> --port={port}`"
TOKEN_ADVICE = (
    "On all nodes, before `ray start` and the run: export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=<one "
    "token of 64 characters>, or RAY_AUTH_MODE=disabled"
)
LOOPBACK_ADVICE = f"ray stop there, and {START}; see a line with 127.0.1.1 in /etc/hosts"


class RayFacts(NamedTuple):
    """Ray as seen by one node.

    `auth_mode` is RAY_AUTH_MODE in lower case, as Ray reads it, `token` the first characters of the
    token's SHA-256. `listeners` and `holders` are addresses and processes on the head's port.
    """

    version: str
    auth_mode: str | None
    token: str
    connection: Connection
    listeners: list[str]
    holders: list[str]

    @property
    def kind(self) -> str:
        """Describe mode and token."""
        if self.auth_mode == "token":
            return f"token with SHA-256 {self.token}..."
        return f"RAY_AUTH_MODE{' unset' if self.auth_mode is None else f'={self.auth_mode}'}"

    @property
    def effective(self) -> tuple[str, str]:
        """Mode and token that the node uses to join; without the mode it sends no token."""
        mode = self.auth_mode or "disabled"
        return mode, self.token if mode == "token" else ""


def examine(agents: NodeProbes, wanted: int) -> list[Finding]:
    """Make all checks ray.* for a run on `wanted` nodes."""
    address = ray_address()
    joined = None if address is None else joined_view()
    place = None if address is None else head_place(address)
    facts, findings = gather(agents, "ray.reachable", ray_facts, place, timeout_s=FACTS_S)
    findings += judge_versions(facts) + judge_tokens(facts, joined=joined is not None)
    unfit = ray_problem(ray_version())
    if address is None:
        return findings + _without_address(len(agents.nodes), wanted)
    if place is None:
        if unfit:
            return findings + _skip(OF_HEAD, f"RAY_ADDRESS={address}, and {unfit} here")
        if joined is None:
            evidence = f"RAY_ADDRESS={address} led to no cluster that this process could join"
            advice = "Set RAY_ADDRESS=<address of the head>:6379, and start the doctor again."
            return [*findings, fail("ray.reachable", "all", evidence, advice)]
        evidence = f"RAY_ADDRESS={address} has been joined"
        findings += [ok("ray.reachable", "all", evidence), skipped("ray.loopback", "all", evidence)]
        return findings + judge_view(joined, address, wanted)
    alive = 0 if joined is None else sum(node.alive for node in joined.nodes)
    several = max(wanted, len(facts)) > 1 and alive < wanted
    findings += judge_reachable(facts, address, several=several)
    if not facts or any(fact.connection.error for fact in facts.values()):
        return findings + _skip(OF_HEAD[2:], "the head is not reached")
    if strangers := [f.connection for f in facts.values() if not f.connection.is_grpc]:
        findings.append(_judge_stranger(address, strangers[0], facts))
        return findings + _skip(OF_HEAD[3:], "no Ray")
    if unfit:
        return findings + _skip(OF_HEAD[2:], f"{unfit} here")
    return findings + judge_view(joined or query_head(address, ASK_S), address, wanted)


def _skip(checks: tuple[str, ...], why: str) -> list[Finding]:
    return [skipped(check, "all", why) for check in checks]


def _without_address(seen: int, wanted: int) -> list[Finding]:
    """Return the findings before Ray is up, or of a run that starts its own Ray."""
    if seen >= wanted:
        starts = "the run starts a Ray of its own, for this machine only"
        return _skip(OF_HEAD, f"RAY_ADDRESS is not set: {starts if seen == 1 else 'no Ray yet'}")
    evidence = f"{seen} of cluster.nodes={wanted} examined: RAY_ADDRESS is not set"
    advice = "Start Ray on all nodes and set RAY_ADDRESS=<address of the head>:6379, or start the "
    advice += "doctor on each node with --join"
    failed = fail("ray.nodes", "all", evidence, advice)
    return [*_skip(OF_HEAD[:3], "RAY_ADDRESS is not set"), failed]


def ray_facts(head: tuple[str, int] | None) -> RayFacts:
    """Examine this node; `head` is host and port of RAY_ADDRESS, None without one."""
    entries = [] if head is None else list(listening([head[1]]))
    mode = os.environ.get("RAY_AUTH_MODE")
    return RayFacts(
        ray_version(),
        mode if mode is None else mode.lower(),
        _token_hash(),
        Connection() if head is None else connect(*head),
        sorted({entry.laddr.ip for entry in entries}),
        sorted({process_text(entry.pid) for entry in entries if entry.pid is not None}),
    )


def _token_hash() -> str:
    """Return the first characters of the SHA-256 of Ray's token, which do not reveal it."""
    token = os.environ.get("RAY_AUTH_TOKEN", "")
    if not token:
        path = os.environ.get("RAY_AUTH_TOKEN_PATH") or os.path.expanduser("~/.ray/auth_token")
        try:  # there may be no home directory
            token = Path(path).read_text().strip()
        except OSError:
            return ""
    return hashlib.sha256(token.encode()).hexdigest()[:TOKEN_CHARACTERS]


def judge_versions(facts: Mapping[str, RayFacts]) -> list[Finding]:
    """Judge ray.version: the installed Ray of each node against the required one."""
    advice = f"{RAY_ADVICE}, then restart Ray there (ray stop)"
    return [
        fail("ray.version", node, problem, advice)
        if (problem := ray_problem(fact.version))
        else ok("ray.version", node, f"Ray {fact.version}")
        for node, fact in facts.items()
    ]


def judge_tokens(facts: Mapping[str, RayFacts], *, joined: bool) -> list[Finding]:
    """Judge ray.token: the same mode and token on all nodes.

    Without RAY_AUTH_MODE, `ray start --head` requires a token that it finds, but a node that joins
    by address sends none. `joined`: this process is already in the cluster.
    """
    if not facts:
        return []
    effective = {node: fact.effective for node, fact in facts.items()}
    without = [node for node, (mode, token) in effective.items() if mode == "token" and not token]
    unused = [node for node, fact in facts.items() if fact.auth_mode is None and fact.token]
    kinds = ", ".join(sorted({fact.kind for fact in facts.values()}))
    if unused:
        kinds += f", and a token on {', '.join(unused)}"
    elif not any(token for _, token in effective.values()):
        kinds += ": no token"
    each = ", ".join(f"{node}: {fact.kind}" for node, fact in facts.items())
    missing = f"RAY_AUTH_MODE=token and no token on {', '.join(without)}"
    refused = f"{kinds}: a head that starts there requires it, but other nodes and runs send none"
    rules: list[Rule] = [
        (fails_if(without), missing, TOKEN_ADVICE),
        (fails_if(len(set(effective.values())) > 1), f"the nodes differ: {each}", TOKEN_ADVICE),
        (fails_if(unused and len(facts) > 1 and not joined), refused, TOKEN_ADVICE),
    ]
    return [first("ray.token", "all", rules, kinds)]


def judge_reachable(facts: Mapping[str, RayFacts], address: str, *, several: bool) -> list[Finding]:
    """Judge ray.reachable and ray.loopback: connections to the head from each node.

    `several`: nodes other than the head must still connect.
    """
    host, _, port = address.rpartition(":")
    alone = ok("ray.loopback", "all", "no other node has to reach the head")
    findings = [_judge_loopback(host, port, facts) if several else alone]
    errors = {node: fact.connection.error for node, fact in facts.items() if fact.connection.error}
    for node, error in errors.items():
        advice = f"Open TCP port {port} of the head for this node, or see `ip route get <head>`"
        if "refused" in error:
            advice = (
                f"If `ss -ltn sport = :{port}` on the head shows nothing or 127.0.0.1: ray stop, "
            )
            advice += f"and {START.format(port=port)}"
        findings.append(fail("ray.reachable", node, f"{node} -> {address}: {error}", advice))
    if facts and not errors:
        longest = max(fact.connection.seconds for fact in facts.values())
        evidence = f"{len(facts)} node(s) connect to {address} within {1e3 * longest:.1f} ms"
        findings.append(ok("ray.reachable", "all", evidence))
    return findings


def _judge_loopback(host: str, port: str, facts: Mapping[str, RayFacts]) -> Finding:
    listeners = {node: fact.listeners for node, fact in facts.items() if fact.listeners}
    advice = LOOPBACK_ADVICE.format(port=port)
    own = host.strip("[]")
    if own == "localhost" or (is_ip(own) and is_loopback(own)):
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


def _judge_stranger(address: str, connection: Connection, facts: Mapping[str, RayFacts]) -> Finding:
    """Judge ray.port, held by a server that is not Ray."""
    holders = sorted({name for fact in facts.values() for name in fact.holders})
    who = f", held by {', '.join(holders)}" if holders else ""
    reply = repr(connection.said) if connection.said else "nothing"
    evidence = f"{address} answers but is no Ray: the reply to a gRPC greeting is {reply}{who}"
    port = address.rpartition(":")[2]
    advice = f"End that server (`ss -ltnp sport = :{port}` on the head), or ray start --head "
    advice += "--port=6380 and set RAY_ADDRESS (6379 is Redis's)"
    return fail("ray.port", "all", evidence, advice)


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
        return [
            fail("ray.port", "all", evidence, f"Restart the head: {START.format(port=port)}"),
            skipped("ray.nodes", "all", "no Ray answers"),
        ]
    version = f"Ray {view.ray_version}, Python {view.python_version}" if view.ray_version else "Ray"
    alive = [node for node in view.nodes if node.alive]
    on_one_machine = len({node.host for node in alive}) == 1 and len(alive) >= wanted
    findings = [ok("ray.port", "all", f"{version} at {address}")]
    for node in alive:
        kind = "" if is_ip(node.address) else "a name"
        if not kind and wanted > 1 and not on_one_machine and is_loopback(node.address):
            kind = "a loopback address"
        if kind:
            evidence = f"{node.host} is known in the cluster by {node.address}, {kind}"
            advice = LOOPBACK_ADVICE.format(port=port)
            findings.append(fail("ray.loopback", node.host, evidence, advice))
    return [*findings, _judge_nodes(view, address, wanted)]


def _judge_nodes(view: ClusterView, address: str, wanted: int) -> Finding:
    alive = [f"{node.host} ({node.address})" for node in view.nodes if node.alive]
    dead = [
        f"{name}{f': {node.reason}' if node.reason else ''}"
        for node in view.nodes
        if not node.alive and (name := f"{node.host} ({node.address})") not in alive
    ]
    evidence = f"{len(alive)} of cluster.nodes={wanted} alive: {', '.join(alive) or 'none'}"
    evidence += f"; dead: {'; '.join(dead)}" if dead else ""
    advice = f"On each missing node: ray start --address={address} --node-ip-address=<its address>"
    rules: list[Rule] = [
        (fails_if(len(alive) < wanted), evidence, f"{advice}; or cluster.nodes={len(alive)}"),
        (warns_if(dead), evidence, f"If the run needs them: {advice}"),
    ]
    return first("ray.nodes", "all", rules, evidence)
