"""Live requests: the driver sends and drops them while others decode.

The first rank of an engine receives the driver's messages and passes them on every few decoding
steps. So all ranks admit and drop the same requests in the same order.
"""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Thread

import torch.distributed as dist

from hybridrl.data.batch import EngineStats
from hybridrl.data.images import HeldImages
from hybridrl.data.requests import (
    FAILED,
    DriverAddress,
    Message,
    Progress,
    Request,
    Served,
    decode_message,
    encode,
)
from hybridrl.distributed import position
from hybridrl.rollout.engine import Engine
from hybridrl.rollout.sampler import Call, Peers

# Decoding steps between two looks at the messages: one for each OPEN_PER_STEP open requests, but at
# least MIN_STEPS. A step that computes prompts takes some milliseconds more, for which all open
# requests wait; so the more there are, the more are admitted together.
MIN_STEPS, OPEN_PER_STEP = 4, 16


class Channel:
    """An engine's side of its connection with the driver. Only the first rank has a `link`."""

    def __init__(self, link: socket.socket | None, peers: Peers) -> None:
        self._link = link
        self._peers = peers
        self._received = SimpleQueue[Message | OSError]()
        self._reader = Thread(target=self._read, daemon=True)
        if link is not None:
            self._reader.start()

    def send(self, progress: list[Progress]) -> None:
        """Send progress to the driver, if there is any; called on all ranks."""
        for one in progress:
            self._peers.note(one.tokens)
        if self._link is not None and progress:
            self._link.sendall(encode(progress))

    def receive(self, *, blocks: bool) -> list[Message]:
        """Return the messages since the last call, the same on all ranks; wait if it `blocks`.

        Raises:
            ConnectionError: the driver has closed the connection.
            RuntimeError: the ranks have sent different tokens.
        """
        messages: list[Message] = []
        while self._link is not None and (blocks or not self._received.empty()):
            message, blocks = self._received.get(), False
            if isinstance(message, OSError):
                raise message
            messages.append(message)
        return self._peers.of_first(messages)

    def close(self) -> None:
        """End the connection once the driver has received everything."""
        if self._link is not None:
            self._link.shutdown(socket.SHUT_WR)
            self._reader.join()

    def _read(self) -> None:
        """Receive messages at once, so that the driver's buffer stays small."""
        assert self._link is not None
        held = HeldImages()
        why = "the driver closed it"
        try:
            with self._link.makefile("rb") as lines:
                for line in lines:
                    self._received.put(decode_message(line, held))
        except (OSError, TypeError, ValueError, KeyError) as error:  # lost, or not a message
            why = repr(error)
        self._received.put(ConnectionError(f"the connection with the driver ended: {why}"))


@contextmanager
def connected(driver: DriverAddress, peers: Peers) -> Iterator[Channel]:
    """Connect an engine with the driver; only its first rank does."""
    engine, rank = divmod(dist.get_rank(), peers.size)
    if rank > 0:
        yield Channel(None, peers)
        return
    with socket.create_connection(driver.address) as link:
        link.settimeout(None)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.sendall(encode(driver.secret) + encode(engine))
        channel = Channel(link, peers)
        try:
            yield channel
        finally:
            channel.close()


def serve(engine: Engine, driver: DriverAddress, version: int) -> Served:
    """Sample the driver's requests by weights number `version`, until the driver ends the run.

    Requests that must finish are sampled to their end: vLLM would apply penalties and grammars to
    the rest as if it were the whole. Others are cut.

    Raises:
        ConnectionError: the driver has closed the connection.
        RuntimeError: as `Sampler.generate`.
    """
    call = Call(engine)
    with connected(driver, Peers(engine.peers)) as channel:
        live = Live(call, channel, version)
        call.run(live.goes_on)
        call.drop([*call.open])
        live.send()
        channel.receive(blocks=False)
        seconds = call.seconds() - live.idle_s
    stats = EngineStats(call.num_tokens, seconds, call.first_token_s)
    return Served(stats, live.idle_s, version)


class Live:
    """Exchange of a call of an engine with the driver, between decoding steps.

    Attributes:
        idle_s: seconds in which no request was open.
    """

    def __init__(self, call: Call, channel: Channel, version: int) -> None:
        self._call = call
        self._channel = channel
        self._version = version
        self._next_look = 0  # in decoding steps
        self._has_ended = False
        self.idle_s = 0.0

    def goes_on(self) -> int:
        """Exchange what there is; return decoding steps up to about the next look, 0 at the end."""
        call = self._call
        if len(call.responses) > len(call.open):  # one has ended
            self.send()
        while call.num_steps >= self._next_look or not call.open:
            if self._has_ended and not call.must_finish:
                return 0
            self._exchange()
        return max(MIN_STEPS, self._next_look - call.num_steps)

    def send(self) -> None:
        """Send the tokens of requests in pieces, and of those that are not open any more."""
        self._call.share()
        progress, responses = [], self._call.responses
        for name, one in [*responses.items()]:
            is_open = name in self._call.open
            if is_open and not (one.request.in_pieces and one.parts):
                continue
            tokens, log_probs = one.tokens.tolist(), one.log_probs.tolist()
            if one.reason == FAILED:
                tokens, log_probs = [], []
            progress.append(Progress(name, tokens, log_probs, one.reason, self._version))
            one.parts.clear()
            if not is_open:
                del responses[name]
        self._channel.send(progress)

    def _exchange(self) -> None:
        """Send progress, then admit and drop what the driver says; wait if no request is open."""
        call, start = self._call, time.perf_counter()
        self.send()
        if is_idle := not call.open:
            position.at("wait for requests")
        for message in self._channel.receive(blocks=is_idle):
            if isinstance(message, Request):
                call.admit([message])
            elif message is None:
                self._has_ended = True
            elif message in call.open:
                call.drop([message])
                del call.responses[message]
        if is_idle:
            self.idle_s += time.perf_counter() - start
        self._next_look = call.num_steps + max(MIN_STEPS, len(call.open) // OPEN_PER_STEP)
