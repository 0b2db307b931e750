"""Several hosts on one machine: network namespaces with their own addresses, names and links.

    bench("10.7.1.2/24", "10.7.2.2/24")    two hosts in different subnets

Each host has one interface, eth0, and its own host name and /etc/hosts. A router, a namespace too,
has a bridge for each subnet and the first address in it. Processes are started in a host by
`Host.start`; whatever of them is left at the end of the block is killed, and all goes away.

Needs root and iproute2. What works in the kernels that these tests meet: `ip rule ... blackhole`,
`tc ... tbf`, routes; neither iptables nor netem is there everywhere.
"""

import contextlib
import ipaddress
import itertools
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ETC = Path("/etc/netns")
_NUMBERS = itertools.count()


def why_not() -> str | None:
    """Why there can be no namespaces here; None if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found (iproute2, util-linux)"
    name = f"hn{os.getpid():x}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespaces: {made.stderr.strip()}"
    ip("netns", "del", name)
    return None


def need_namespaces() -> None:
    """Skip the test where there can be no namespaces, but not under CI=true."""
    reason = why_not()
    if reason is not None and os.environ.get("CI") != "true":
        pytest.skip(reason)


def ip(*words: str) -> str:
    """What `ip` with these words says; it must succeed."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
    return done.stdout


@dataclass
class Host:
    """A machine of the bench.

    Attributes:
        name: its host name.
        namespace: that it is.
        address: of its eth0.
        gateway: the router's address in its subnet.
        router: the router's namespace.
        environment: added to that of processes started there.
    """

    name: str
    namespace: str
    address: str
    gateway: str
    router: str
    environment: dict[str, str] = field(default_factory=dict)

    def start(self, *command: str | Path, **options: Any) -> "subprocess.Popen[Any]":
        """Start a command on this host; `env` is added to the environment of the tests."""
        env = os.environ | {"PYTHONPATH": str(ROOT)} | self.environment | options.pop("env", {})
        name = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name]
        return subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, *name, *map(str, command)], env=env, **options
        )

    def run(self, *command: str | Path, **options: Any) -> str:
        """Run a command on this host to its end, which must be a success; its output."""
        with self.start(
            *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
        ) as process:
            output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, f"{command}: {output}"
        return output

    @contextlib.contextmanager
    def unreachable_from(self, other: "Host", ports: str) -> Iterator[None]:
        """Packets from `other` to these TCP ports ("29500", "32768-60999") stay unanswered."""
        rule = ["to", other.address, "ipproto", "tcp", "sport", ports, "blackhole", "pref", "100"]
        ip("-n", self.namespace, "rule", "add", *rule)
        try:
            yield
        finally:
            ip("-n", self.namespace, "rule", "del", *rule)

    @contextlib.contextmanager
    def firewall_to(self, other: "Host", ports: str) -> Iterator[None]:
        """The router drops TCP packets to a host in another subnet that go between such ports."""
        ends = ["from", self.address, "to", other.address, "ipproto", "tcp"]
        rule = [*ends, "sport", ports, "dport", ports, "blackhole", "pref", "100"]
        ip("-n", self.router, "rule", "add", *rule)
        try:
            yield
        finally:
            ip("-n", self.router, "rule", "del", *rule)

    @contextlib.contextmanager
    def without_route(self) -> Iterator[None]:
        """The host knows its own subnet alone."""
        route = ["default", "via", self.gateway]
        ip("-n", self.namespace, "route", "del", *route)
        try:
            yield
        finally:
            ip("-n", self.namespace, "route", "add", *route)

    @contextlib.contextmanager
    def unroutable(self, other: "Host") -> Iterator[None]:
        """The host has no route to another one."""
        ip("-n", self.namespace, "route", "add", "unreachable", other.address)
        try:
            yield
        finally:
            ip("-n", self.namespace, "route", "del", "unreachable", other.address)

    @contextlib.contextmanager
    def slow_link(self, rate: str) -> Iterator[None]:
        """What the host sends is limited to a rate such as 80mbit."""
        shape = ["tbf", "rate", rate, "burst", "128kb", "latency", "50ms"]
        device = ["-n", self.namespace, "qdisc", "add", "dev", "eth0", "root"]
        subprocess.run(["tc", *device, *shape], check=True)
        try:
            yield
        finally:
            subprocess.run(["tc", "-n", self.namespace, "qdisc", "del", "dev", "eth0", "root"])

    @contextlib.contextmanager
    def small_packets(self, mtu: int) -> Iterator[None]:
        """The router silently drops larger packets that the host sends."""
        port = f"v{self.name.rpartition('-')[2]}"
        ip("-n", self.namespace, "link", "set", "eth0", "gso_max_segs", "1")
        ip("-n", self.router, "link", "set", port, "mtu", str(mtu))
        try:
            yield
        finally:
            ip("-n", self.router, "link", "set", port, "mtu", "1500")
            ip("-n", self.namespace, "link", "set", "eth0", "gso_max_segs", "65535")

    def call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """What a function of a module returns in a process of its own on this host."""
        code = "from tests.support.namespaces import answer_call; answer_call()"
        with self.start(
            *(sys.executable, "-c", code),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            **options,
        ) as process:
            reply, _ = process.communicate(pickle.dumps((function, arguments)), timeout=120)
        assert process.returncode == 0, f"{function.__name__} on {self.name}: see stderr"
        return pickle.loads(reply)

    def start_ray(self, log: Path, *options: str, **environment: str) -> None:
        """Start a node of Ray with one CPU and wait until it is up; killed with the host.

        Args:
            log: a file for its output.
            options: of `ray start`.
            environment: of its processes.
        """
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1"]
        store = f"--object-store-memory={100 * 2**20}"
        with log.open("w") as file:
            process = self.start(
                *command, store, *options, env=environment, stdout=file, stderr=file
            )
        deadline = time.monotonic() + 60.0
        while "Ray runtime started" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)

    def kill_all(self) -> None:
        """Kill every process that runs in the namespace."""
        for _ in range(20):
            pids = ip("netns", "pids", self.namespace).split()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            if not pids:
                return
            time.sleep(0.05)


@contextlib.contextmanager
def bench(*addresses: str) -> Iterator[list[Host]]:
    """Hosts with these addresses, as in 10.7.1.2/24; gone at the end, come what may."""
    tag = f"h{os.getpid():x}{next(_NUMBERS)}"
    interfaces = [ipaddress.ip_interface(address) for address in addresses]
    router = f"{tag}-r"
    hosts = [
        Host(f"{tag}-{k}", f"{tag}-{k}", str(one.ip), str(one.network[1]), router)
        for k, one in enumerate(interfaces)
    ]
    try:
        ip("netns", "add", router)
        _connect(router, hosts, interfaces)
        yield hosts
    finally:
        for host in hosts:
            with contextlib.suppress(AssertionError):
                host.kill_all()
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True)
            shutil.rmtree(ETC / host.namespace, ignore_errors=True)
        subprocess.run(["ip", "netns", "del", router], capture_output=True)
        with contextlib.suppress(OSError):
            ETC.rmdir()  # where nobody else has a file there


def _connect(router: str, hosts: list[Host], interfaces: list[Any]) -> None:
    subprocess.run(
        ["ip", "netns", "exec", router, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"],
        check=True,
    )
    bridges = {str(one.network): f"b{k}" for k, one in enumerate(interfaces)}
    for subnet, bridge in bridges.items():
        network = ipaddress.ip_network(subnet)
        ip("-n", router, "link", "add", "name", bridge, "type", "bridge")
        ip("-n", router, "addr", "add", f"{network[1]}/{network.prefixlen}", "dev", bridge)
        ip("-n", router, "link", "set", bridge, "up")
    names = "127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in hosts)
    for k, (host, one) in enumerate(zip(hosts, interfaces, strict=True)):
        write_hosts(host, names)
        ip("netns", "add", host.namespace)
        ip("-n", router, *f"link add v{k} type veth peer eth0 netns {host.namespace}".split())
        ip("-n", router, *f"link set v{k} master {bridges[str(one.network)]} up".split())
        for words in (
            f"addr add {one} dev eth0",
            "link set eth0 up",
            "link set lo up",
            f"route add default via {host.gateway}",
        ):
            ip("-n", host.namespace, *words.split())


@contextlib.contextmanager
def second_interfaces(hosts: list[Host], *addresses: str) -> Iterator[None]:
    """An eth1 on each host with its address; each subnet is a wire of its own, without a router."""
    router = hosts[0].router
    subnets = [str(ipaddress.ip_interface(address).network) for address in addresses]
    bridges = {subnet: f"s{k}" for k, subnet in enumerate(dict.fromkeys(subnets))}
    try:
        for bridge in bridges.values():
            ip("-n", router, *f"link add name {bridge} up type bridge".split())
        for k, (host, address, subnet) in enumerate(zip(hosts, addresses, subnets, strict=True)):
            ip("-n", router, *f"link add w{k} type veth peer eth1 netns {host.namespace}".split())
            ip("-n", router, *f"link set w{k} master {bridges[subnet]} up".split())
            ip("-n", host.namespace, *f"addr add {address} dev eth1".split())
            ip("-n", host.namespace, *["link", "set", "eth1", "up"])
        yield
    finally:
        for link in [*(f"w{k}" for k in range(len(hosts))), *bridges.values()]:
            subprocess.run(["ip", "-n", router, "link", "del", link], capture_output=True)


def write_hosts(host: Host, text: str) -> None:
    """Make /etc/hosts of the processes that start on a host from now on."""
    (ETC / host.namespace).mkdir(parents=True, exist_ok=True)
    (ETC / host.namespace / "hosts").write_text(text)
    # No name server: names that are not in the file are unknown at once.
    (ETC / host.namespace / "resolv.conf").write_text("")


def answer_call() -> None:
    """The process of `Host.call`."""
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    function, arguments = pickle.load(sys.stdin.buffer)
    pickle.dump(function(*arguments), answer)
    answer.flush()
