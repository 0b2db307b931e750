"""Nodes that call in by themselves, before there is a Ray.

On every node: python -m hybridrl.doctor --join HEAD:PORT --nodes N. The node that has the address
HEAD listens there, the others connect to it and run what it sends, which is Python: both ends prove
that they know the same key first.
"""

import os
import pickle
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from queue import Empty, Queue
from threading import Lock, Thread
from types import TracebackType
from typing import Any

from hybridrl.config.errors import ConfigError
from hybridrl.controller.ray.node_probes import (
    NodeIdentity,
    ProbeResult,
    collect,
    in_thread,
    node_names,
    packed,
    run_packed,
)
from hybridrl.doctor.joined_wire import (
    KEY,
    admit,
    connect,
    family,
    hides_behind_loopback,
    key_for,
    parse_place,
    resolved,
)


def listens_here(address: str) -> bool:
    """Whether this node has the address of HEAD:PORT, and is to use `JoinedProbes`.

    Raises:
        ConfigError: the host is not known here.
    """
    with socket.socket(family(resolved(address))) as probe:
        try:
            probe.bind((resolved(address), 0))
        except OSError:
            return False
    return True


class JoinedProbes:
    """The head's side: waits until all nodes have called in, and ends them at the end of the block.

    Args:
        address: HEAD:PORT, on which it listens.
        nodes: how many there are, this one included.
        timeout_s: seconds until all must have called in.

    Raises:
        ConfigError: on entering: a node is missing, the port is in use, or there is no key and
            other machines reach the address.
    """

    def __init__(self, address: str, nodes: int, timeout_s: float) -> None:
        self._address = address
        self._number = nodes
        self._timeout_s = timeout_s
        self._peers: dict[str, _Peer] = {}
        self._nodes: list[str] = []
        self._addresses: dict[str, str] = {}

    def __enter__(self) -> "JoinedProbes":
        own = resolved(self._address)
        if self._number > 1 and hides_behind_loopback(self._address):
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
    ) -> dict[str, ProbeResult]:
        """Implement `NodeProbes.call_each`; after a timeout, a function continues in its node."""
        futures = {}
        for node, values in arguments.items():
            if node in self._peers:
                futures[node] = self._peers[node].call(packed(function, values))
            else:
                futures[node] = in_thread(function, *values)
        return collect(futures, timeout_s)

    def _peers_that_call(self, own: str) -> "list[_Peer]":
        key = key_for(self._address)
        with self._listen(own) as listener:
            try:
                return self._wait_for_peers(listener, key)
            finally:
                listener.shutdown(socket.SHUT_RDWR)  # closing alone would not wake the thread

    def _listen(self, own: str) -> socket.socket:
        port = parse_place(self._address).port
        try:
            return socket.create_server((own, port), family=family(own), backlog=self._number)
        except OSError as error:
            raise ConfigError(
                f"--join {self._address}: cannot listen there: {error.strerror}.\n"
                f"`ss -ltnp sport = :{port}` says who does; give all nodes another port."
            ) from error

    def _wait_for_peers(self, listener: socket.socket, key: bytes) -> "list[_Peer]":
        deadline = time.monotonic() + self._timeout_s
        admitted: Queue[_Peer | str] = Queue()
        Thread(target=_accept, args=(listener, key, admitted), daemon=True).start()
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
        here = NodeIdentity(socket.gethostname(), resolved(self._address), "")
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
    connection = connect(address, timeout_s)
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
        self._waiting: dict[int, Future[ProbeResult]] = {}
        self._calls = 0
        self._gone = False
        Thread(target=self._read, daemon=True).start()

    def call(self, call: bytes) -> "Future[ProbeResult]":
        """Send a call; its answer, or that the node has hung up."""
        future: Future[ProbeResult] = Future()
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
            future.set_result(
                ProbeResult(error="hung up: its process has ended or the network is gone")
            )


def _accept(listener: socket.socket, key: bytes, admitted: "Queue[_Peer | str]") -> None:
    """Admit callers until the listener is closed; one that says nothing holds up no other."""
    with suppress(OSError):
        while True:
            caller, peer = listener.accept()
            arguments = (caller, peer[0], key, admitted)
            Thread(target=_admit, args=arguments, daemon=True).start()


def _admit(caller: socket.socket, address: str, key: bytes, admitted: "Queue[_Peer | str]") -> None:
    try:
        connection, (host, pid) = admit(caller, key)
    except AuthenticationError:
        admitted.put(f"{address} has another key (set {KEY} to the same word on all nodes)")
    except (EOFError, OSError, AssertionError):
        admitted.put(f"{address} connected and said nothing that is understood here")
    else:
        admitted.put(_Peer(connection, NodeIdentity(host, address, f"pid {pid}")))
