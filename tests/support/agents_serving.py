"""The endpoint of agents over a real engine with the embedded model, and what that sampled."""

import time
from asyncio import StreamWriter
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any
from unittest.mock import patch

from hybridrl.agents.episode import Episode
from hybridrl.agents.training.batch import EpisodeResult, batch_of
from hybridrl.agents.training.endpoint import Endpoint
from hybridrl.commands.evaluation.session import rollout_engines
from hybridrl.commands.evaluation.subject import Subject
from hybridrl.controller.live_engines import LiveEngines
from hybridrl.controller.ray.runtime import ray_runtime
from hybridrl.controller.worker_group import WorkerGroup
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.requests import Message, Progress, Request
from hybridrl.models.resolve import absolute_path
from tests.support.run_configs import run_config

CONTEXT = 960
# Before the embedded model's template, which leaves tools out; it changes what is sampled little.
WITH_TOOLS = "{% if tools %}{{ '\\n' }}{% endif %}"


class Sampled(LiveEngines):
    """Engines that note the requests that they were sent, and the tokens sampled for them.

    Attributes:
        requests: as first sent; one that was cut comes again.
        admitted: how often each was sent.
        runs: how often an engine has begun to serve.
    """

    def __init__(self, group: WorkerGroup) -> None:
        super().__init__(group)
        self.requests: dict[str, Request] = {}
        self.admitted: Counter[str] = Counter()
        self.runs = 0
        self.tokens: dict[str, list[tuple[int, float]]] = {}

    def _send(self, engine: int, message: Message) -> None:
        if isinstance(message, Request) and engine in self._engines:
            self.requests.setdefault(message.request_id, message)
            self.admitted[message.request_id] += 1
        super()._send(engine, message)

    def _begin(self, engine: int, writer: StreamWriter) -> None:
        self.runs += 1
        super()._begin(engine, writer)

    def _advance(self, progress: Sequence[Progress]) -> None:
        for one in progress:
            pairs = zip(one.tokens, one.log_probs, strict=True)
            self.tokens.setdefault(one.request_id, []).extend(pairs)
        super()._advance(progress)


class Served:
    """An endpoint that runs in this process."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        assert isinstance(endpoint.engines, Sampled)
        self.sampled = endpoint.engines
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

    def repeat(self, episode: Episode, attempt: str) -> str:
        """Begin another attempt of an episode, and return its key."""
        self.endpoint.server.call(self.endpoint.policy.repeat, episode.name, attempt)
        return f"{episode.name}.{attempt}"

    def batch(self, episode: Episode) -> RolloutBatch:
        """End an episode, and return its batch, of which each trained token was sampled."""
        (episode,) = self.endpoint.server.call(self.endpoint.policy.close, [episode.name])
        result = EpisodeResult(0, 0, [5, 6], episode.record.sequences, 1.0, 0)
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
        group = rollout_engines(config, Subject("embedded"), folder, stack)
        with patch("hybridrl.agents.training.endpoint.LiveEngines", Sampled):
            endpoint = Endpoint(config.rollout, group, "127.0.0.1", 0, tool_parser=tool_parser)
        served = Served(stack.enter_context(endpoint))
        tokenizer = endpoint.policy.text._tokenizer
        tokenizer.chat_template = WITH_TOOLS + tokenizer.chat_template
        engines = Thread(target=served.sample)
        engines.start()
        stack.callback(engines.join)
        stack.callback(served.stop)
        yield served
