"""Rollout engines under the endpoint: requests go in at any time, while others are sampled.

Requests and tokens pass between the endpoint and the engines directly (data/requests.py); the
driver's main thread waits for the call in which the engines serve. What is open at its end goes on
in the next: as a request with the tokens so far as its prompt.
"""

import asyncio
import hmac
import secrets
from asyncio import StreamReader, StreamWriter
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Any, NamedTuple

from hybridrl.controller.worker_group import WorkerGroup
from hybridrl.data.batch import EngineStats
from hybridrl.data.images import HeldImages
from hybridrl.data.requests import (
    TICK,
    DriverAddress,
    Message,
    Progress,
    Request,
    Served,
    decode_progress,
    encode,
)
from hybridrl.data.seeds import derive_seed

# Requests whose progress is passed on at once.
PORTION = 8
# Longest line of an engine.
MAX_BYTES = 2**30
# Seconds in which someone who connects must send the secret.
GREETING_S = 10.0
# Less than any limit on the silence of a rank.
TICK_S = 1.0


class OpenRequest(NamedTuple):
    """A request that is being sampled, and its tokens so far."""

    request: Request
    tokens: list[int]

    def rest(self) -> Request:
        """Return the request that continues it."""
        request, count = self.request, len(self.tokens)
        return request._replace(
            prompt=[*request.prompt, *self.tokens],
            max_tokens=request.max_tokens - count,
            seed=derive_seed(request.seed, "after", count) if count else request.seed,
        )


class LiveEngines:
    """Engines of a run that sample continuously.

    All methods but `run` and `wake` are called in the thread of the endpoint's event loop.

    Attributes:
        served: what each engine did in the last `run`.
    """

    def __init__(self, rollout: WorkerGroup) -> None:
        self._rollout = rollout
        self._loop: asyncio.AbstractEventLoop | None = None  # while engines serve
        self._is_enough: Callable[[], bool] = lambda: True
        self._has_ended = True
        self._error: Exception | None = None
        self._engines: dict[int, StreamWriter] = {}
        self._held: dict[int, HeldImages] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server
        self._ticking: asyncio.Task[None]
        self._open: dict[str, OpenRequest] = {}
        self._queues: dict[str, asyncio.Queue[Progress]] = {}
        self._undelivered = deque[Progress]()
        self.served: Sequence[Served] = [Served(EngineStats(0, 0.0, 0.0), 0.0, 0)]

    @property
    def num_engines(self) -> int:
        """Number of engines."""
        return self._rollout.num_shards

    def submit(self, request: Request) -> "asyncio.Queue[Progress]":
        """Begin to sample; between two runs, with the next one."""
        queue = self._queues[request.request_id] = asyncio.Queue()
        self._open[request.request_id] = OpenRequest(request, [])
        if not self._has_ended:
            self._send(request.engine, request)
        return queue

    def cancel(self, request: Request) -> None:
        """Drop a request, unless it has ended."""
        self._queues.pop(request.request_id, None)
        if self._open.pop(request.request_id, None) is not None:
            self._send(request.engine, request.request_id)

    def wake(self, *_: object) -> None:
        """Make `run` ask again whether it is enough; called in any thread."""
        if (loop := self._loop) is not None:
            loop.call_soon_threadsafe(self._end_if_enough)

    def run(self, is_enough: Callable[[], bool], loop: asyncio.AbstractEventLoop) -> None:
        """Sample until it is enough, which is asked in the thread of the event loop.

        The next run continues what is open, unless it is cancelled.

        Raises:
            WorkerError: a rank failed.
        """

        def in_loop(work: Coroutine[Any, Any, Any]) -> Any:
            return asyncio.run_coroutine_threadsafe(work, loop).result()

        self._is_enough, self._has_ended, self._error = is_enough, False, None
        driver = in_loop(self._listen())
        try:
            self._loop = loop
            served = self._rollout.call("serve", driver)
            in_loop(self._all_received())
        finally:
            self._loop = None
            in_loop(self._close())
        if self._error is not None:
            raise self._error
        self.served = served[:: self._rollout.ranks_per_shard]

    async def _listen(self) -> DriverAddress:
        """Listen until all engines are connected."""
        secret, host = secrets.token_hex(), self._rollout.pool.driver_address
        accept = partial(self._accept, secret)
        self._server = await asyncio.start_server(accept, host, 0, limit=MAX_BYTES)
        self._ticking = asyncio.create_task(self._tick())
        return DriverAddress(self._server.sockets[0].getsockname(), secret)

    async def _all_received(self) -> None:
        """Wait until all engines have closed their connections."""
        await asyncio.gather(*self._connections)

    async def _close(self) -> None:
        self._has_ended = True
        self._server.close()
        self._ticking.cancel()
        for writer in self._engines.values():  # after a failure
            writer.close()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, secret: str, reader: StreamReader, writer: StreamWriter) -> None:
        """Pass an engine's messages on, until it closes the connection."""
        with closing(writer), suppress(EOFError, OSError):
            async with asyncio.timeout(GREETING_S):
                expected = encode(secret)
                if not hmac.compare_digest(await reader.readexactly(len(expected)), expected):
                    return
                engine = int(await reader.readline())
            task = asyncio.current_task()
            assert task is not None
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)
            try:
                self._begin(engine, writer)
                while line := await reader.readline():
                    self._advance(decode_progress(line))
            finally:
                del self._engines[engine]

    def _begin(self, engine: int, writer: StreamWriter) -> None:
        """Send an engine the requests that are open."""
        self._engines[engine], self._held[engine] = writer, HeldImages()
        for name, one in self._open.items():
            if one.request.engine == engine:
                self._open[name] = OpenRequest(one.rest(), [])
                self._send(engine, self._open[name].request)
        if len(self._engines) == self.num_engines:
            self._server.close()
            self._end_if_enough()

    def _end_if_enough(self) -> None:
        if self._has_ended or len(self._engines) < self.num_engines:
            return
        try:
            self._has_ended = self._is_enough()
        except Exception as error:  # of the caller; `run` raises it
            self._has_ended, self._error = True, error
        if self._has_ended:
            for engine in self._engines:
                self._send(engine, None)

    async def _tick(self) -> None:
        """Wake the engines now and then while none has a request, so that waiting is no stall.

        While one has requests, the others are left alone: they would hide that it hangs.
        """
        while True:
            await asyncio.sleep(TICK_S)
            if not self._open:
                for engine in self._engines:
                    self._send(engine, TICK)

    def _send(self, engine: int, message: Message) -> None:
        """Send a message, unless the engine has gone, whose failure `run` raises."""
        if (writer := self._engines.get(engine)) is not None:
            writer.write(encode(message, self._held[engine]))

    def _advance(self, progress: Sequence[Progress]) -> None:
        """Note the tokens of open requests, and pass them on in their order."""
        is_idle = not self._undelivered
        for one in progress:
            if one.request_id in self._open:
                self._open[one.request_id].tokens.extend(one.tokens)
                if one.reason:
                    del self._open[one.request_id]
                self._undelivered.append(one)
        if is_idle:
            self._deliver()

    def _deliver(self) -> None:
        """Pass on progress; between portions the event loop handles the next requests."""
        for _ in range(min(PORTION, len(self._undelivered))):
            one = self._undelivered.popleft()
            if (queue := self._queues.get(one.request_id)) is not None:
                queue.put_nowait(one)
                if one.reason:
                    del self._queues[one.request_id]
        if self._undelivered:
            asyncio.get_running_loop().call_soon(self._deliver)
