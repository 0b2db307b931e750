"""Nodes of `doctor --join`, before there is a Ray.

The same command runs on every node. The node with the address HEAD listens, the others connect
and run the probes that it sends. Probes are pickled, so both ends prove the same key first.
"""

import os
import pickle
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from queue import Empty, Queue
from threading import Lock, Thread
from typing import Any

from hybridrl.config.errors import ConfigError
from hybridrl.controller.ray.node_probes import (
    NodeIdentity,
    NodeProbes,
    ProbeResult,
    collect,
    in_thread,
    node_names,
    packed,
    run_packed,
)
from hybridrl.doctor.gather import ProbeGroup
from hybridrl.doctor.joined_connection import (
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
    """Return True if this node has the address of HEAD:PORT.

    Raises:
        ConfigError: this node does not know the host.
    """
    own = resolved(address)
    with socket.socket(family(own)) as probe:
        try:
            probe.bind((own, 0))
        except OSError:
            return False
    return True


@contextmanager
def joined_probes(address: str, nodes: int, timeout_s: float) -> Iterator[NodeProbes]:
    """Wait on the head until all nodes have joined; yield them, and end them afterwards.

    Args:
        address: HEAD:PORT.
        nodes: number of nodes, this one included.
        timeout_s: seconds until all must have joined.

    Raises:
        ConfigError: a node is missing, the port is in use, or there is no key and other machines
            reach the address.
    """
    own = resolved(address)
    if nodes > 1 and hides_behind_loopback(address):
        raise ConfigError(
            f"--join {address}: on this node the name resolves to {own}, unreachable for others.\n"
            "Give an IP address of the node in place of its name."
        )
    joined = _join(address, own, nodes, timeout_s) if nodes > 1 else []
    head = NodeIdentity(socket.gethostname(), own, f"pid {os.getpid()}")
    identities = [head, *(peer.identity for peer in joined)]
    names = node_names(identities)
    peers = dict(zip(names[1:], joined, strict=True))
    addresses = [identity.address for identity in identities]

    def call_each(
        function: Callable[..., Any], arguments: Mapping[str, tuple[Any, ...]], timeout_s: float
    ) -> dict[str, ProbeResult]:
        futures = {
            node: peers[node].call(packed(function, values))
            if node in peers
            else in_thread(function, *values)
            for node, values in arguments.items()
        }
        return collect(futures, timeout_s)

    try:
        yield ProbeGroup(names, dict(zip(names, addresses, strict=True)), call_each)
    finally:
        for peer in joined:
            peer.end()


def _join(address: str, own: str, nodes: int, timeout_s: float) -> "list[_Peer]":
    key, port = key_for(address), parse_place(address).port
    try:
        listener = socket.create_server((own, port), family=family(own), backlog=nodes)
    except OSError as error:
        raise ConfigError(
            f"--join {address}: cannot listen there: {error.strerror}.\n"
            f"`ss -ltnp sport = :{port}` shows who does; give all nodes another port."
        ) from error
    deadline = time.monotonic() + timeout_s
    admitted: Queue[_Peer | str] = Queue()
    peers: list[_Peer] = []
    refused: set[str] = set()
    with listener:
        Thread(target=_accept, args=(listener, key, admitted), daemon=True).start()
        try:
            while len(peers) < nodes - 1:
                caller = admitted.get(timeout=max(0.0, deadline - time.monotonic()))
                if isinstance(caller, str):
                    refused.add(caller)
                else:
                    peers.append(caller)
        except Empty:
            for peer in peers:
                peer.end()
            here = NodeIdentity(socket.gethostname(), own, "")
            known = [f"{n.address} ({n.host})" for n in (here, *(peer.identity for peer in peers))]
            raise ConfigError(
                f"{len(known)} of {nodes} nodes called in within {timeout_s:g} s: "
                f"{', '.join(known)}."
                + "".join(f"\nRefused: {text}." for text in sorted(refused))
                + "\nOn each of the others, start the same command with "
                f"--join {address} --nodes {nodes}, and read its errors."
            ) from None
        finally:
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
    return sorted(peers, key=lambda peer: peer.identity)


def serve(address: str, timeout_s: float) -> None:
    """Connect to the head at HEAD:PORT within the timeout, and run its probes until it ends.

    Raises:
        ConfigError: the head cannot be reached, has another key, or disconnects early.
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
                    f"the head at {address} hung up before its end. Read its output for the "
                    "reason; more nodes may have joined than its --nodes."
                ) from error
            if message is None:
                return
            Thread(target=_answer, args=(connection, lock, *message), daemon=True).start()


def _answer(connection: Connection, lock: Lock, number: int, call: bytes) -> None:
    reply = run_packed(call)
    with lock, suppress(OSError):  # the head may have ended
        connection.send((number, reply))


class _Peer:
    """Connection of the head to a node, with numbered calls."""

    def __init__(self, connection: Connection, identity: NodeIdentity) -> None:
        self.identity = identity
        self._connection = connection
        self._lock = Lock()
        self._pending: dict[int, Future[ProbeResult]] = {}
        self._calls = 0
        self._gone = False
        Thread(target=self._read, daemon=True).start()

    def call(self, call: bytes) -> "Future[ProbeResult]":
        """Send a call; the answer is an error if the node has disconnected."""
        future: Future[ProbeResult] = Future()
        with self._lock:
            self._calls += 1
            self._pending[self._calls] = future
            try:
                self._connection.send((self._calls, call))
            except OSError:
                self._gone = True
            if self._gone:
                self._fail_pending()
        return future

    def end(self) -> None:
        """Send the end to the node."""
        with self._lock, suppress(OSError):
            self._connection.send(None)

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                number, reply = self._connection.recv()
                answer = pickle.loads(reply)
                with self._lock:
                    self._pending.pop(number).set_result(answer)
        with self._lock:
            self._gone = True
            self._fail_pending()

    def _fail_pending(self) -> None:
        while self._pending:
            _, future = self._pending.popitem()
            future.set_result(
                ProbeResult(error="hung up: its process has ended or the network is gone")
            )


def _accept(listener: socket.socket, key: bytes, admitted: "Queue[_Peer | str]") -> None:
    """Admit callers until the listener is closed, each in a thread of its own."""
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
        admitted.put(f"{address} connected, but is no node of the doctor")
    else:
        admitted.put(_Peer(connection, NodeIdentity(host, address, f"pid {pid}")))
