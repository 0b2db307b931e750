"""Nodes that call in by themselves, before there is a Ray.

On every node: python -m hybridrl.doctor --join HEAD:PORT --nodes N. The node that has the address
HEAD listens there, the others connect to it and run what it sends, which is Python: both ends prove
that they know the same key first.
"""

import ipaddress
import logging
import os
import pickle
import socket
import struct
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from queue import Empty, Queue
from threading import Lock, Thread
from types import TracebackType
from typing import Any, NamedTuple

from hybridrl.config.errors import ConfigError
from hybridrl.controller.agents import (
    Answer,
    NodeIdentity,
    collect,
    in_thread,
    node_names,
    packed,
    run_packed,
)

logger = logging.getLogger(__name__)

KEY = "HYBRIDRL_DOCTOR_KEY"
RAY_KEY = "RAY_AUTH_TOKEN"
NO_KEY = "hybridrl-doctor"
# Seconds for one attempt to connect, and for both ends to prove the key.
ATTEMPT_S = 3.0
RETRY_S = 0.3
# Seconds without a sign of life after which the kernel gives up a connection: 4 x 5.
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class Place(NamedTuple):
    """Where the head listens."""

    host: str
    port: int


def parse_place(text: str) -> Place:
    """HEAD:PORT; an IPv6 address in brackets.

    Raises:
        ConfigError: it is something else.
    """
    host, _, port = text.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigError(f"--join {text}: expected HEAD:PORT, 10.0.0.1:29400 for one.")
    return Place(host.removeprefix("[").removesuffix("]"), int(port))


def listens_here(address: str) -> bool:
    """Whether this node has the address of HEAD:PORT, and is to use `JoinedAgents`.

    Raises:
        ConfigError: the host is not known here.
    """
    with socket.socket(_family(_resolved(address))) as probe:
        try:
            probe.bind((_resolved(address), 0))
        except OSError:
            return False
    return True


class JoinedAgents:
    """The head's side: waits until all nodes have called in, and ends them at the end of the block.

    Args:
        address: HEAD:PORT, on which it listens.
        nodes: how many there are, this one included.
        timeout_s: seconds until all must have called in.

    Raises:
        ConfigError: on entering: a node is missing, or the port is in use.
    """

    def __init__(self, address: str, nodes: int, timeout_s: float) -> None:
        self._address = address
        self._number = nodes
        self._timeout_s = timeout_s
        self._peers: dict[str, _Peer] = {}
        self._nodes: list[str] = []
        self._addresses: dict[str, str] = {}

    def __enter__(self) -> "JoinedAgents":
        own = _resolved(self._address)
        if self._number > 1 and _hides_behind_loopback(self._address):
            raise ConfigError(
                f"--join {self._address}: this node takes the name for {own}, which no other node "
                "reaches.\nGive an IP address of the node in place of its name."
            )
        peers = self._peers_that_call(own) if self._number > 1 else []
        head = NodeIdentity(socket.gethostname(), own, f"pid {os.getpid()}")
        names = node_names([head, *(peer.identity for peer in peers)])
        self._nodes = names
        self._peers = dict(zip(names[1:], peers, strict=True))
        identities = [head, *(peer.identity for peer in peers)]
        self._addresses = {
            name: identity.address for name, identity in zip(names, identities, strict=True)
        }
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for peer in self._peers.values():
            peer.end()

    @property
    def nodes(self) -> list[str]:
        """Host names, with addresses where they repeat; this node first."""
        return self._nodes

    @property
    def addresses(self) -> dict[str, str]:
        """As the head sees them."""
        return self._addresses

    def call_each(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, tuple[Any, ...]],
        timeout_s: float,
    ) -> dict[str, Answer]:
        """As `Agents.call_each`; a function that is late goes on in its node."""
        futures = {}
        for node, values in arguments.items():
            if node in self._peers:
                futures[node] = self._peers[node].call(packed(function, values))
            else:
                futures[node] = in_thread(function, *values)
        return collect(futures, timeout_s)

    def _peers_that_call(self, own: str) -> "list[_Peer]":
        if _key() == NO_KEY.encode() and not ipaddress.ip_address(own).is_loopback:
            logger.warning(
                "until all nodes have called in, who reaches %s may run programs here; set %s to "
                "the same secret word on all nodes where others share the network",
                self._address,
                KEY,
            )
        with self._listen(own) as listener:
            try:
                return self._wait_for_peers(listener)
            finally:
                listener.shutdown(socket.SHUT_RDWR)  # closing alone would not wake the thread

    def _listen(self, own: str) -> socket.socket:
        port = parse_place(self._address).port
        try:
            return socket.create_server((own, port), family=_family(own), backlog=self._number)
        except OSError as error:
            raise ConfigError(
                f"--join {self._address}: cannot listen there: {error.strerror}.\n"
                f"`ss -ltnp sport = :{port}` says who does; give all nodes another port."
            ) from error

    def _wait_for_peers(self, listener: socket.socket) -> "list[_Peer]":
        deadline = time.monotonic() + self._timeout_s
        admitted: Queue[_Peer | str] = Queue()
        Thread(target=_accept, args=(listener, admitted), daemon=True).start()
        peers: list[_Peer] = []
        strangers: set[str] = set()
        while len(peers) < self._number - 1:
            try:
                caller = admitted.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                for peer in peers:
                    peer.end()
                raise ConfigError(self._missing(peers, strangers)) from None
            if isinstance(caller, str):
                strangers.add(caller)
            else:
                peers.append(caller)
        return sorted(peers, key=lambda peer: peer.identity)

    def _missing(self, peers: "list[_Peer]", strangers: set[str]) -> str:
        here = NodeIdentity(socket.gethostname(), _resolved(self._address), "")
        known = [here, *(peer.identity for peer in peers)]
        names = ", ".join(f"{node.address} ({node.host})" for node in known)
        refused = "".join(f"\nRefused: {text}." for text in sorted(strangers))
        return (
            f"{len(known)} of {self._number} nodes called in within {self._timeout_s:g} s: {names}."
            f"{refused}\nOn each of the others, start the same command with "
            f"--join {self._address} --nodes {self._number}; it says what it cannot reach."
        )


def serve(address: str, timeout_s: float) -> None:
    """The other nodes' side: connect to the head and run what it sends until it is done.

    Args:
        address: HEAD:PORT of the head.
        timeout_s: seconds in which the head must have been reached.

    Raises:
        ConfigError: the head cannot be reached, has another key, or is gone before its end.
    """
    connection = _connect(address, timeout_s)
    lock = Lock()
    with connection:
        connection.send((socket.gethostname(), os.getpid()))
        while True:
            try:
                message = connection.recv()
            except (EOFError, OSError) as error:
                raise ConfigError(
                    f"the head at {address} hung up before its end. Its own output says why; "
                    "where it is full, fewer nodes were asked for than have called in."
                ) from error
            if message is None:
                return
            Thread(target=_answer, args=(connection, lock, *message), daemon=True).start()


def _answer(connection: Connection, lock: Lock, number: int, call: bytes) -> None:
    reply = run_packed(call)
    with lock, suppress(OSError):  # the head may be gone
        connection.send((number, reply))


class _Peer:
    """A node that has called in."""

    def __init__(self, connection: Connection, identity: NodeIdentity) -> None:
        self.identity = identity
        self._connection = connection
        self._lock = Lock()
        self._waiting: dict[int, Future[Answer]] = {}
        self._calls = 0
        self._gone = False
        Thread(target=self._read, daemon=True).start()

    def call(self, call: bytes) -> "Future[Answer]":
        """Send a call; its answer, or that the node has hung up."""
        future: Future[Answer] = Future()
        with self._lock:
            self._calls += 1
            self._waiting[self._calls] = future
            try:
                self._connection.send((self._calls, call))
            except OSError:
                self._gone = True
            if self._gone:
                self._hang_up()
        return future

    def end(self) -> None:
        """Tell the node that all is done."""
        with self._lock, suppress(OSError):
            self._connection.send(None)

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                number, reply = self._connection.recv()
                answer = pickle.loads(reply)
                with self._lock:
                    self._waiting.pop(number).set_result(answer)
        with self._lock:
            self._gone = True
            self._hang_up()

    def _hang_up(self) -> None:
        while self._waiting:
            _, future = self._waiting.popitem()
            future.set_result(Answer(error="hung up: its process has ended or the network is gone"))


def _accept(listener: socket.socket, admitted: "Queue[_Peer | str]") -> None:
    """Admit callers until the listener is closed; one that says nothing holds up no other."""
    with suppress(OSError):
        while True:
            caller, peer = listener.accept()
            Thread(target=_admit, args=(caller, peer[0], admitted), daemon=True).start()


def _admit(caller: socket.socket, address: str, admitted: "Queue[_Peer | str]") -> None:
    _limit_waiting(caller, ATTEMPT_S)
    connection = Connection(caller.detach())
    try:
        deliver_challenge(connection, _key())
        answer_challenge(connection, _key())
        host, pid = connection.recv()
    except AuthenticationError:
        admitted.put(f"{address} has another key (set {KEY} to the same word on all nodes)")
    except (EOFError, OSError, AssertionError):
        admitted.put(f"{address} connected and said nothing that is understood here")
    else:
        _limit_waiting_of(connection, 0.0)
        admitted.put(_Peer(connection, NodeIdentity(host, address, f"pid {pid}")))


def _connect(address: str, timeout_s: float) -> Connection:
    place = parse_place(address)
    deadline = time.monotonic() + timeout_s
    why = "no time to try"
    while (left := deadline - time.monotonic()) > 0:
        try:
            return _attempt(place, min(ATTEMPT_S, left))
        except AuthenticationError as error:
            raise ConfigError(
                f"the head at {address} has another key.\nSet {KEY} to the same word on all nodes."
            ) from error
        except (EOFError, AssertionError, BlockingIOError):
            why = "somebody answers who is not a doctor that waits for nodes"
        except OSError as error:
            why = error.strerror or str(error)
        time.sleep(min(RETRY_S, max(0.0, deadline - time.monotonic())))
    raise ConfigError(
        f"this node cannot reach the head at {address} within {timeout_s:g} s: {why}.\n"
        "Start the same command on the head; refused: it does not listen yet or on another port; "
        "timed out or no route: a firewall or the wrong address (`ip route get "
        f"{place.host}`)."
    )


def _attempt(place: Place, timeout_s: float) -> Connection:
    stream = socket.create_connection(place, timeout_s)
    stream.setblocking(True)
    _limit_waiting(stream, timeout_s)
    connection = Connection(stream.detach())
    try:
        answer_challenge(connection, _key())
        deliver_challenge(connection, _key())
    except BaseException:
        connection.close()
        raise
    _limit_waiting_of(connection, 0.0)
    return connection


def _limit_waiting_of(connection: Connection, seconds: float) -> None:
    duplicate = socket.socket(fileno=os.dup(connection.fileno()))
    with duplicate:
        _limit_waiting(duplicate, seconds)


def _limit_waiting(stream: socket.socket, seconds: float) -> None:
    """Let reads that wait for longer fail (0: wait for ever), and notice a dead other end."""
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _key() -> bytes:
    return (os.environ.get(KEY) or os.environ.get(RAY_KEY) or NO_KEY).encode()


def _resolved(address: str) -> str:
    host = parse_place(address).host
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(
            f"--join {address}: {host} is not known on this node ({error.strerror}).\n"
            "Give an IP address, or add the name to /etc/hosts."
        ) from error


def _hides_behind_loopback(address: str) -> bool:
    """Whether HEAD is a name that /etc/hosts of the head gives a loopback address."""
    return (
        _resolved(address) != parse_place(address).host != "localhost"
        and ipaddress.ip_address(_resolved(address)).is_loopback
    )


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
