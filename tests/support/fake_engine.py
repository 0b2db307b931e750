"""An engine whose responses are scripted, under the loop and the partition of real ones."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor

from hybridrl.data.batch import EngineStats, RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.data.requests import LENGTH, STOP, Request, Requests
from hybridrl.distributed.experts import CheckpointTensor
from hybridrl.distributed.regions import Trace
from hybridrl.rollout.engine import EnginePart, Step
from hybridrl.rollout.sampler import Sampler
from hybridrl.trainer.sampling.hybrid_engine import SplitEngine

# The tokens of a request's response; beyond its max_tokens they are cut.
Script = Callable[[Request], Sequence[int]]
# Any prompt fits.
LIMITS = {"max_prompt_tokens": 10**6, "max_response_tokens": 10**6, "max_num_seqs": None}
CONFIG = SimpleNamespace(**LIMITS, seed=0)


class FakeEngine:
    """Engine that answers by a script, a token of each open request a step.

    `log_prob` is that of a sequence's last token. With `fails`, requests end so after a token.

    Attributes:
        requests: all that were submitted, by the names that the caller gave them.
        open: sequence so far and tokens that are left of each open request.
    """

    sources: list[CheckpointTensor] = []  # noqa: RUF012
    trace = Trace([], [], {})
    keeps_weights = True
    peers = None

    def __init__(
        self,
        script: Script,
        log_prob: Callable[[list[int]], float] = lambda sequence: -float(sequence[-1]),
        fails: str = "",
        most_steps: int = 1,
    ) -> None:
        self.awake, self.most_steps = frozenset(EnginePart), most_steps
        self.script, self.log_prob, self.fails = script, log_prob, fails
        self.requests: list[Request] = []
        self.open: dict[str, tuple[list[int], list[int]]] = {}
        self.cut: set[str] = set()

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def wake(self, part: EnginePart) -> None:
        self.awake |= {part}

    def sleep(self) -> None:
        self.awake = frozenset()

    def sync(self) -> None:
        pass

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            named = request._replace(request_id=request.request_id.rpartition("/")[2])
            tokens = [*self.script(named)]
            assert request.request_id not in self.open and tokens
            self.requests.append(named)
            left = tokens[: request.max_tokens]
            self.open[request.request_id] = [*request.prompt], left
            if left != tokens:
                self.cut.add(request.request_id)

    def cancel(self, request_ids: Sequence[str]) -> None:
        for name in request_ids:
            del self.open[name]

    def step(self, most: int = 1) -> Step:
        names, tokens, log_probs, ended = [], [], [], {}
        for name in [*self.open]:
            sequence, left = self.open[name]
            for _ in range(min(most, self.most_steps, len(left))):
                names.append(name)
                tokens.append(left.pop(0))
                sequence.append(tokens[-1])
                log_probs.append(self.log_prob(sequence))
            if self.fails or not left:
                ended[name] = self.fails or (LENGTH if name in self.cut else STOP)
                del self.open[name]
        steps = min(most, self.most_steps)
        return Step(names, tokens, np.array(log_probs, np.float32), ended, steps)

    def drain(self) -> Iterator[Step]:
        return iter(())

    def take_recorded(self, request_ids: Sequence[str]) -> dict[str, Ragged]:
        return {}


class FakeEngines(SplitEngine):
    """Engines of a run, called as the driver calls them. `options` are those of FakeEngine.

    Each call of an engine takes 2 s, the first token 0.5 s.

    Attributes:
        calls: requests of each call.
        weight_version: updates so far.
        holds: number of the weights that sample.
    """

    def __init__(self, script: Script, count: int = 1, **options: Any) -> None:
        self.samplers = [Sampler(FakeEngine(script, **options), CONFIG) for _ in range(count)]
        self.calls: list[Requests] = []
        self.weight_version = self.holds = 0

    @property
    def num_shards(self) -> int:
        return len(self.samplers)

    def generate(self, requests: Requests) -> RolloutBatch:
        self.calls.append(requests)
        parts = zip(self.samplers, requests.shard(self.num_shards), strict=True)
        answers = [sampler.generate(part, self.holds) for sampler, part in parts]
        for index, answer in enumerate(answers):
            (stats,) = answer.engines
            times = (2.0, 0.5) if stats.tokens else (0.0, 0.0)
            stats = EngineStats(stats.tokens, *times, stats.old_kv_tokens)
            answers[index] = replace(answer, engines=(stats,))
        return requests.join(answers)

    def begin(
        self, method: str, requests: Requests, arriving: int | None
    ) -> Callable[[], RolloutBatch]:
        """Sample with the weights that are there; they change by `swap` alone."""
        assert method == "generate_ahead" and arriving in (None, self.holds + 1)
        batch = self.generate(requests)
        return lambda: batch

    def send(self) -> Any:
        return self.weight_version

    def swap(self, sent: Any) -> dict[str, float]:
        self.holds = self.holds if sent is None else sent
        return {"split/swap_s": 0.0}
