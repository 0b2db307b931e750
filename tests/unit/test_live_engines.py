"""Exchange of requests and tokens between the endpoint and its engines."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from hybridrl.controller.live_engines import PORTION, LiveEngines
from hybridrl.data.batch import EngineStats
from hybridrl.data.requests import (
    DriverAddress,
    Progress,
    Request,
    SamplingParams,
    Served,
    decode_message,
    encode,
)
from hybridrl.rollout.live import Channel
from hybridrl.rollout.sampler import Peers

REQUEST = Request("0", [1, 2], 5, 9, SamplingParams(1.0), engine=0)


@dataclass
class Rollout:
    """A group of one engine that runs `engine` in this process."""

    engine: Callable[[DriverAddress], None]
    num_shards = ranks_per_shard = 1
    pool = SimpleNamespace(driver_address="127.0.0.1")

    def call(self, method: str, driver: DriverAddress) -> list[Served]:
        assert method == "serve"
        self.engine(driver)
        return [Served(EngineStats(0, 0.0, 0.0), 0.0, 3)]


@contextmanager
def event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@contextmanager
def connected(driver: DriverAddress) -> Iterator[socket.socket]:
    with socket.create_connection(driver.address, timeout=10) as link:
        link.sendall(encode(driver.secret) + encode(0))
        yield link


def in_loop(loop: asyncio.AbstractEventLoop, function: Callable, *args):
    async def called():
        return function(*args)

    return asyncio.run_coroutine_threadsafe(called(), loop).result(10)


def test_only_who_knows_the_secret_is_an_engine():
    def engine(driver: DriverAddress) -> None:
        silent = socket.create_connection(driver.address)
        with socket.create_connection(driver.address, timeout=10) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n" * 10)
            assert stranger.recv(1) == b""
        with connected(driver) as link, link.makefile("rb") as received:
            assert decode_message(received.readline()) is None
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(driver.address)
        silent.close()

    with event_loop() as loop:
        engines = LiveEngines(Rollout(engine))
        engines.run(lambda: True, loop)
        assert engines.served[0].weight_version == 3


def test_tokens_come_in_their_order_however_late_they_are_passed_on():
    """More than are passed on at once, and a second message before the first is through."""
    count = 3 * PORTION
    requests = [Request(str(k), [k], k, 9, REQUEST.params, 0, in_pieces=True) for k in range(count)]

    def engine(driver: DriverAddress) -> None:
        with connected(driver) as link, link.makefile("rb") as received:
            assert [decode_message(received.readline()) for _ in requests] == requests
            first = [Progress(str(k), [1, 2], [-1.0, -1.0], "") for k in range(count)]
            last = [Progress(str(k), [3], [-1.0], "STOP") for k in range(count)]
            link.sendall(encode(first) + encode(last))
            while not is_through():
                time.sleep(0.001)
            engines.wake()
            assert decode_message(received.readline()) is None

    def is_through() -> bool:
        return all(queue.qsize() == 2 for queue in queues)

    with event_loop() as loop:
        engines = LiveEngines(Rollout(engine))
        queues = [in_loop(loop, engines.submit, request) for request in requests]
        engines.run(is_through, loop)
        for queue in queues:
            found = [queue.get_nowait() for _ in range(2)]
            assert [one.tokens for one in found] == [[1, 2], [3]]


def test_what_is_open_goes_on_in_the_next_run():
    asked = []

    def engine(driver: DriverAddress) -> None:
        with connected(driver) as link, link.makefile("rb") as received:
            asked.append(decode_message(received.readline()))
            assert decode_message(received.readline()) is None
            link.sendall(encode([Progress("0", [7, 8], [-1.0, -2.0], "")]))

    with event_loop() as loop:
        engines = LiveEngines(Rollout(engine))
        in_loop(loop, engines.submit, REQUEST)
        engines.run(lambda: True, loop)
        engines.run(lambda: True, loop)
    first, second = asked
    assert first == REQUEST and second.seed != first.seed
    assert (second.prompt, second.max_tokens) == ([1, 2, 7, 8], 7)


def test_failures_end_a_run():
    def dies(driver: DriverAddress) -> None:
        with connected(driver):
            raise RuntimeError("the engine died")

    def waits(driver: DriverAddress) -> None:
        with connected(driver) as link, link.makefile("rb") as received:
            assert decode_message(received.readline()) is None

    with event_loop() as loop:
        engines = LiveEngines(Rollout(dies))
        with pytest.raises(RuntimeError, match="the engine died"):
            engines.run(lambda: False, loop)
        engines.wake()
        with pytest.raises(ZeroDivisionError):
            LiveEngines(Rollout(waits)).run(lambda: 1 / 0 > 0, loop)


def test_an_engine_ends_when_the_driver_is_gone():
    ours, theirs = socket.socketpair()
    channel = Channel(theirs, Peers(None))
    assert channel.receive(blocks=False) == []
    ours.sendall(encode(REQUEST))
    assert channel.receive(blocks=True) == [REQUEST]
    ours.close()
    with pytest.raises(ConnectionError, match="connection with the driver ended"):
        channel.receive(blocks=True)
    theirs.close()
