"""Rollout engines under the endpoint: requests go in at any time, while others are sampled.

Requests and tokens pass between the endpoint's thread and the engines directly (data/live.py); the
driver's main thread waits for the call in which the engines serve. What is open at its end goes on
in the next: as a request with the tokens so far as its prompt.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from threading import Thread
from typing import NamedTuple

from hybridrl.controller.worker_group import WorkerGroup
from hybridrl.data.batch import EngineStats
from hybridrl.data.live import LiveRequest, Meeting, Message, Progress, send_at_once
from hybridrl.data.seeds import derive_seed

# Requests whose progress is passed on at once.
PORTION = 8


class OpenRequest(NamedTuple):
    """A request that is being sampled, and its tokens so far."""

    request: LiveRequest
    tokens: list[int]

    def rest(self) -> LiveRequest:
        """Return the request that continues it."""
        request, count = self.request, len(self.tokens)
        return replace(
            request,
            prompt=[*request.prompt, *self.tokens],
            max_tokens=request.max_tokens - count,
            seed=derive_seed(request.seed, "after", count) if count else request.seed,
        )


class LiveEngines:
    """Engines of a run that sample continuously.

    All methods but `run` and `wake` are called in the thread of the endpoint's event loop.

    Attributes:
        weight_version: of the weights that sampled in the last `run`.
        stats: of each engine in the last `run`.
        waited_s: seconds of the last `run` in which the busiest engine had no request.
    """

    def __init__(self, rollout: WorkerGroup) -> None:
        self._rollout = rollout
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_enough: Callable[[], bool] | None = None
        self._lines: dict[int, Connection] = {}
        self._open: dict[str, OpenRequest] = {}
        self._queues: dict[str, asyncio.Queue[Progress]] = {}
        self.weight_version = 0
        self.stats: tuple[EngineStats, ...] = ()
        self.waited_s = 0.0

    @property
    def num_engines(self) -> int:
        """Number of engines."""
        return self._rollout.num_shards

    def submit(self, request: LiveRequest) -> "asyncio.Queue[Progress]":
        """Begin to sample; between two runs, with the next one."""
        queue = self._queues[request.request_id] = asyncio.Queue()
        self._open[request.request_id] = OpenRequest(request, [])
        self._send(request.engine, request)
        return queue

    def cancel(self, request: LiveRequest) -> None:
        """Drop a request, unless it has ended."""
        self._queues.pop(request.request_id, None)
        if self._open.pop(request.request_id, None) is not None:
            self._send(request.engine, request.request_id)

    def wake(self, *_: object) -> None:
        """Make `run` ask again whether it is enough; called in any thread."""
        if self._is_enough is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._ask)

    def run(self, is_enough: Callable[[], bool], loop: asyncio.AbstractEventLoop) -> None:
        """Sample until it is enough, which is asked in the thread of the event loop.

        The next run continues what is open, unless it is cancelled.

        Raises:
            WorkerError: a rank failed.
        """
        start, secret = time.perf_counter(), secrets.token_bytes()
        self._loop, self._is_enough = loop, is_enough
        address = self._rollout.pool.driver_address, 0
        with Listener(address, backlog=self.num_engines, authkey=secret) as listener:
            wait = self._rollout.begin("serve", Meeting(listener.address, secret))
            threads = [
                Thread(target=self._receive, args=(listener, loop), daemon=True)
                for _ in range(self.num_engines)
            ]
            for thread in threads:
                thread.start()
            found = wait()[:: self._rollout.ranks_per_shard]
            for thread in threads:
                thread.join()
        self._is_enough = None
        self.stats = tuple(stats for stats, _ in found)
        self.weight_version = found[0][1]
        busy_s = max(stats.seconds for stats in self.stats)
        self.waited_s = time.perf_counter() - start - busy_s

    def _receive(self, listener: Listener, loop: asyncio.AbstractEventLoop) -> None:
        """Pass an engine's messages to the event loop, until the engine closes the connection."""
        with accepted(listener) as connection, suppress(EOFError, OSError):
            send_at_once(connection)
            loop.call_soon_threadsafe(self._connected, connection.recv(), connection)
            while True:
                loop.call_soon_threadsafe(self._advance, connection.recv())

    def _connected(self, engine: int, connection: Connection) -> None:
        self._lines[engine] = connection
        for name, one in self._open.items():
            if one.request.engine == engine:
                self._open[name] = OpenRequest(one.rest(), [])
                self._send(engine, self._open[name].request)
        self._ask()

    def _ask(self) -> None:
        """End the run if it is enough."""
        if self._is_enough is not None and self._is_enough():
            for engine in [*self._lines]:
                self._send(engine, None)
                del self._lines[engine]

    def _send(self, engine: int, message: Message) -> None:
        if (connection := self._lines.get(engine)) is not None:
            with suppress(OSError):  # `run` raises what has happened to the engine
                connection.send(message)

    def _advance(self, progress: Sequence[Progress]) -> None:
        """Note the tokens of open requests, and pass them on."""
        known = [one for one in progress if one.request_id in self._open]
        for one in known:
            self._open[one.request_id].tokens.extend(one.tokens)
            if one.reason:
                del self._open[one.request_id]
        self._deliver(known)

    def _deliver(self, progress: Sequence[Progress]) -> None:
        """Pass on progress; between portions the event loop handles the next requests."""
        for one in progress[:PORTION]:
            if (queue := self._queues.get(one.request_id)) is not None:
                queue.put_nowait(one)
                if one.reason:
                    del self._queues[one.request_id]
        if rest := progress[PORTION:]:
            asyncio.get_running_loop().call_soon(self._deliver, rest)


def accepted(listener: Listener) -> Connection:
    """Return the next connection of someone who knows the secret."""
    while True:
        with suppress(AuthenticationError, EOFError, ConnectionError):
            return listener.accept()
