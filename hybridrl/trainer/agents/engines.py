"""Rollout engines under the endpoint: requests go in at any time, a few decoding steps per call.

The endpoint's thread submits requests; the driver's main thread calls the engines as long as a
step samples, the next call before the last one has ended: so they wait for nobody. What is open at
the end of a step's sampling goes on in the next: as a request with the tokens so far as its prompt.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

from hybridrl.controller.worker_group import WorkerGroup
from hybridrl.data.batch import EngineStats
from hybridrl.data.live import EngineProgress, LiveCall, LiveRequest, Progress
from hybridrl.data.seeds import derive_seed

# Decoding steps of one call: more save calls, fewer admit requests sooner.
STEPS = 4
# Calls that an engine has before it, with the one that runs.
AHEAD = 2
# Requests whose progress is passed on at once.
PORTION = 8
# Waits for a call, and returns the progress of each engine.
Wait = Callable[[], Sequence[EngineProgress]]


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

    Attributes:
        weight_version: of the weights that sampled in the last `run`.
        stats: of each engine in the last `run`.
        waited_s: seconds of the last `run` in which no engine had a request.
    """

    def __init__(self, rollout: WorkerGroup) -> None:
        self._rollout = rollout
        self._inbox: SimpleQueue[LiveRequest | tuple[int, str] | None] = SimpleQueue()
        self._queues: dict[str, asyncio.Queue[Progress]] = {}
        self._open: dict[str, OpenRequest] = {}
        self.weight_version = 0
        self.stats: tuple[EngineStats, ...] = ()
        self.waited_s = 0.0

    @property
    def num_engines(self) -> int:
        """Number of engines."""
        return self._rollout.num_shards

    def submit(self, request: LiveRequest) -> "asyncio.Queue[Progress]":
        """Begin to sample; called in the endpoint's thread."""
        queue = self._queues[request.request_id] = asyncio.Queue()
        self._inbox.put(request)
        return queue

    def cancel(self, request: LiveRequest) -> None:
        """Drop a request, unless it has ended; called in the endpoint's thread."""
        if self._queues.pop(request.request_id, None) is not None:
            self._inbox.put((request.engine, request.request_id))

    def wake(self, *_: object) -> None:
        """Make `run` ask again whether it is enough."""
        self._inbox.put(None)

    def run(self, is_enough: Callable[[], bool], loop: asyncio.AbstractEventLoop) -> None:
        """Sample until it is enough. The next run continues what is open, unless it is cancelled.

        Requests with sampling parameters of their own end before: vLLM would apply penalties and
        grammars to the rest as if it were the whole.

        Raises:
            WorkerError: a rank failed.
        """
        self.stats, self.waited_s = (EngineStats(0, 0.0, 0.0),) * self.num_engines, 0.0
        take = partial(self._take, start=time.perf_counter(), loop=loop)
        begun = deque[Wait]()
        while not is_enough():
            new, cancelled = self._received(waits=not begun)
            if new or cancelled or self._open:
                begun.append(self._begin(new, cancelled, STEPS))
            if begun and (len(begun) == AHEAD or not self._open):
                take(begun.popleft())
        while begun:
            take(begun.popleft())
        while any(one.request.sampling for one in self._open.values()):
            take(self._begin([], [], STEPS))
        cut = [(one.request.engine, name) for name, one in self._open.items()]
        take(self._begin([], cut, 0))
        for one in self._open.values():
            self._inbox.put(one.rest())
        self._open = {}

    def _received(self, *, waits: bool) -> tuple[list[LiveRequest], list[tuple[int, str]]]:
        """Return new and cancelled requests; if it `waits` and none is open, wait for one."""
        found = []
        if waits and not self._open:
            start = time.perf_counter()
            found.append(self._inbox.get())
            self.waited_s += time.perf_counter() - start
        while not self._inbox.empty():
            found.append(self._inbox.get())
        new = [one for one in found if isinstance(one, LiveRequest)]
        cancelled = [one for one in found if isinstance(one, tuple)]
        self._open |= {request.request_id: OpenRequest(request, []) for request in new}
        known = [(engine, name) for engine, name in cancelled if name in self._open]
        for _, name in known:
            del self._open[name]
        gone = {name for _, name in known}
        return [one for one in new if one.request_id not in gone], known

    def _begin(self, new: list[LiveRequest], cancelled: list[tuple[int, str]], steps: int) -> Wait:
        """Begin to advance the engines."""
        return self._rollout.begin("advance", LiveCall(new, cancelled, steps))

    def _take(self, wait: Wait, *, start: float, loop: asyncio.AbstractEventLoop) -> None:
        """Wait for a call of the engines; hand its progress to the endpoint's thread."""
        found = wait()
        self.weight_version = found[0].weight_version
        waited = time.perf_counter() - start
        self.stats = tuple(
            _added(stats, engine, waited) for stats, engine in zip(self.stats, found, strict=True)
        )
        progress = [
            one._replace(version=engine.weight_version)
            for engine in found
            for one in engine.progress
            if one.request_id in self._open
        ]
        for one in progress:
            self._open[one.request_id].tokens.extend(one.tokens)
            if one.reason:
                del self._open[one.request_id]
        if progress:
            loop.call_soon_threadsafe(self._deliver, progress)

    def _deliver(self, progress: Sequence[Progress]) -> None:
        """Pass on progress; between portions the event loop handles the next requests."""
        for one in progress[:PORTION]:
            if (queue := self._queues.get(one.request_id)) is not None:
                queue.put_nowait(one)
                if one.reason:
                    del self._queues[one.request_id]
        if rest := progress[PORTION:]:
            asyncio.get_running_loop().call_soon(self._deliver, rest)


def _added(stats: EngineStats, engine: EngineProgress, waited: float) -> EngineStats:
    first = stats.first_token_s or (waited if engine.tokens else 0.0)
    return EngineStats(stats.tokens + engine.tokens, stats.seconds + engine.seconds, first)
