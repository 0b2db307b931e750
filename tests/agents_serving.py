"""The endpoint of agents over a real engine with the embedded model, and what that sampled."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

from hybridrl.agents.episode import Episode
from hybridrl.commands.evaluation.session import rollout_engines
from hybridrl.controller.ray.runtime import ray_runtime
from hybridrl.controller.worker_group import WorkerGroup
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.live import EngineProgress, LiveCall, LiveRequest
from hybridrl.models.resolve import absolute_path
from hybridrl.trainer.agents.batch import EpisodeResult, batch_of
from hybridrl.trainer.agents.endpoint import Endpoint
from tests.run_configs import run_config

CONTEXT = 960


class Sampled:
    """A worker group that notes the requests and the tokens that its engine sampled for them."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self.num_shards = group.num_shards
        self.requests: dict[str, LiveRequest] = {}
        self.admitted: Counter[str] = Counter()
        self.calls = 0
        self.cancelled: set[str] = set()
        self.tokens: dict[str, list[tuple[int, float]]] = {}

    def begin(self, method: str, call: LiveCall) -> Callable[[], list[EngineProgress]]:
        self.calls += 1
        for request in call.new:  # one that was cut comes again
            self.requests.setdefault(request.request_id, request)
            self.admitted[request.request_id] += 1
        self.cancelled |= {name for _, name in call.cancelled}
        wait = self._group.begin(method, call)

        def result() -> list[EngineProgress]:
            found: list[EngineProgress] = wait()
            for one in [one for engine in found for one in engine.progress]:
                pairs = zip(one.tokens, one.log_probs, strict=True)
                self.tokens.setdefault(one.request_id, []).extend(pairs)
            return found

        return result


class Served:
    """An endpoint that runs in this process."""

    def __init__(self, endpoint: Endpoint, sampled: Sampled) -> None:
        self.endpoint = endpoint
        self.sampled = sampled
        self.url = endpoint.server.url
        self._count = 0
        self._is_cut, self._is_still, self.is_over = Event(), Event(), Event()

    def sample(self) -> None:
        """Sample until it is over; meanwhile stand still where `cut` says so."""
        engines, loop = self.endpoint.engines, self.endpoint.server.loop
        while not self.is_over.is_set():
            engines.run(lambda: self.is_over.is_set() or self._is_cut.is_set(), loop)
            while self._is_cut.is_set():
                self._is_still.set()
                time.sleep(0.001)

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Cut what is sampled; the engines stand still in the block, as during an update."""
        self._is_still.clear()
        self._is_cut.set()
        self.endpoint.engines.wake()
        assert self._is_still.wait(30)
        yield
        self._is_cut.clear()

    def stop(self) -> None:
        """End `sample`."""
        self.is_over.set()
        self.endpoint.engines.wake()

    def episode(self, *seeds: int, **settings: Any) -> Episode:
        """Open an episode; its seeds derive from `seeds`, by default its number."""
        self._count += 1
        own = replace(self.endpoint.settings, **settings)
        parts = seeds or (self._count,)
        return self.endpoint.episode(f"key{self._count}", parts, 0, own)

    def batch(self, episode: Episode) -> RolloutBatch:
        """End an episode, and return its batch, of which each trained token was sampled."""
        self.endpoint.server.call(self.endpoint.policy.close, [episode.key])
        result = EpisodeResult(0, 0, [5, 6], episode.record, 1.0, 0)
        batch = batch_of([result], 0, self.endpoint.end_token)
        unused = dict(self.sampled.tokens)
        for sequence in episode.record.sequences:
            for turn in sequence.turns:
                part = slice(turn.start, turn.end)
                own = [*zip(sequence.ids[part], sequence.log_probs[part], strict=True)]
                name = next(
                    name
                    for name, pairs in unused.items()
                    if pairs[: len(own)] == own
                    and self.sampled.requests[name].prompt == sequence.ids[: turn.start]
                )
                del unused[name]
        return batch


@contextmanager
def serving(folder: Path, *, tool_parser: str | None = "hermes") -> Iterator[Served]:
    """Serve the embedded model in this process until the end of the block."""
    config = run_config(
        "rollout.max_prompt_tokens=900", "rollout.max_response_tokens=60", "model=embedded"
    )
    config.model.path = absolute_path("embedded")
    with ray_runtime(config.cluster, config.hardware.accelerator), ExitStack() as stack:
        sampled = Sampled(rollout_engines(config, None, 0, folder, stack))
        endpoint = Endpoint(config.rollout, sampled, "127.0.0.1", 0, tool_parser=tool_parser)  # type: ignore[arg-type]
        stack.enter_context(endpoint)
        served = Served(endpoint, sampled)
        engines = Thread(target=served.sample)
        engines.start()
        stack.callback(engines.join)
        stack.callback(served.stop)
        yield served
