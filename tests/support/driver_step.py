"""A step's work of the driver alone: the real trainer, with ranks that answer at once.

    THP_MEM_ALLOC_ENABLE=1 python -m tests.support.driver_step --responses 4096 --steps 3

The variable, which hybridrl.main sets for itself, must be there before torch is imported.
Responses have log-normal lengths of mean 4,096, at most 32,768; prompts have 256 tokens. Ranks and
reward function do nothing: they hand back values that lie in shared memory, as Ray's object store
would, and what is sent to them is copied into such memory. Prints one JSON line: for each step the
seconds of its phases without the ranks', the peak of the process's own memory (RssAnon) over that
before the first step, and the bytes of the batch as it was trained on.
"""

import argparse
import json
import mmap
import os
import pickle
import re
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch

from hybridrl.app.observers import Start
from hybridrl.config.estimators import uses_critic
from hybridrl.config.planner.model_shape import model_shape
from hybridrl.config.schema import RunConfig
from hybridrl.controller.calls import Span, SpanLog, TimedResult
from hybridrl.controller.placement import Host, Slot
from hybridrl.controller.worker_group import WorkerGroup, Workers
from hybridrl.data.batch import EngineStats, RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.data.requests import Requests
from hybridrl.data.schedule import RankBatch
from hybridrl.data.sources.prompts import Prompt, PromptSets
from hybridrl.health.measures import MarkedTokens
from hybridrl.health.observer import HealthChecks
from hybridrl.models.resolve import read_model_config
from hybridrl.trainer.build import LoopParts, build_loop
from hybridrl.trainer.factory import one_turn
from hybridrl.trainer.nonfinite import NonFiniteGuard
from hybridrl.trainer.record import Evaluation, Observer, Row, RunHandle, StepRecord
from hybridrl.trainer.rewarding import Rewarded
from hybridrl.trainer.sampling.start_check import StartCheck
from hybridrl.trainer.updates import Updates
from hybridrl.workers.base import Dispatch, Worker, on_all_ranks
from tests.support.peak_memory import peak_in, private_bytes
from tests.support.run_configs import run_config

RANKS, EACH, PROMPT_TOKENS, MEAN, CAP = 8, 8, 256, 4096, 32768


def lengths_of(count: int) -> torch.Tensor:
    """Log-normal response lengths of mean MEAN, cut at CAP."""
    sigma = 0.9
    noise = torch.randn(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mean = MEAN * 1.03  # the cut takes some of it
    lengths = (sigma * noise - sigma**2 / 2).exp() * mean
    return lengths.long().clamp(1, CAP)


class SharedMemory:
    """Copies of values in memory that is not the process's own, as in Ray's object store.

    Its pages are used again once nothing is in it.

    Args:
        size: bytes.
    """

    def __init__(self, size: int) -> None:
        with TemporaryFile(dir="/dev/shm") as file:
            file.truncate(size)
            self._memory = memoryview(mmap.mmap(file.fileno(), size))
        self._next = 0

    def clear(self) -> None:
        """Nothing in it is used any more."""
        self._next = 0

    def copy(self, values: Any) -> Any:
        """Values whose arrays lie in the memory."""
        buffers: list[pickle.PickleBuffer] = []
        data = pickle.dumps(values, protocol=5, buffer_callback=buffers.append)
        views = []
        for raw in (buffer.raw() for buffer in buffers):
            view = self._memory[self._next : self._next + raw.nbytes]
            view[:] = raw
            views.append(view.toreadonly())
            self._next += -(-raw.nbytes // 64) * 64
        return pickle.loads(data, buffers=views)


class Idle(Worker):
    """A role of any kind; `Ranks` answers for it."""

    @on_all_ranks(Dispatch.SHARD_DP)
    def generate(self, requests: Requests) -> RolloutBatch:
        """Responses."""
        raise NotImplementedError

    @on_all_ranks(Dispatch.SHARD_DP)
    def compute_log_probs(self, batch: RankBatch) -> Ragged:
        """A value for each token of the first epoch."""
        raise NotImplementedError

    compute_values = compute_log_probs

    @on_all_ranks(Dispatch.SHARD_DP_REDUCED)
    def update(self, batch: RankBatch, step: int, kl_coef: float = 0.0) -> dict[str, float]:
        """Metrics."""
        raise NotImplementedError

    @on_all_ranks(Dispatch.BROADCAST)
    def reshard(self, version: int) -> dict[str, float]:
        """Metrics."""
        raise NotImplementedError

    @on_all_ranks(Dispatch.BROADCAST)
    def sleep(self) -> None:
        """Nothing."""
        raise NotImplementedError


class Ranks:
    """A pool whose processes answer at once, and the object store beside it.

    Attributes:
        seconds: that answering took, which is not the driver's work.
    """

    def __init__(self, count: int) -> None:
        self.size = RANKS
        self.hosts = [
            Host(k, None, Slot("node", "127.0.0.1", k), 0, "node", Path("log"))
            for k in range(RANKS)
        ]
        self.spans = SpanLog(RANKS)
        self.store = self
        self.seconds = 0.0
        self._version = 0
        self._stored: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self._lengths = lengths_of(count)
        total = int(self._lengths.sum())
        generator = torch.Generator().manual_seed(1)
        size = torch.tensor([total])
        made = [
            0.1 * torch.randn(total, generator=generator) - 1.0,
            0.1 * torch.randn(total, generator=generator) - 1.0,
            torch.randint(0, 150_000, (total,), generator=generator, dtype=torch.int32),
            torch.ones(total, dtype=torch.bool),
        ]
        kept = SharedMemory(sum(tensor.nbytes for tensor in made) + 2**16)
        *self._noise, self._tokens, self._mask = (
            kept.copy(Ragged(tensor, size)).values for tensor in made
        )
        self._sent = SharedMemory(64 * total + 2**24)

    def reference(self, piece: Any) -> Any:
        """Where ranks find a piece; it is copied once."""
        if not self._stored:
            self._sent.clear()
        if piece not in self._stored:
            self._stored[piece] = self._sent.copy(piece())
        return self._stored[piece]

    def run(self, method: str, arguments: Any, phase: str) -> Any:
        """Call and wait."""
        return self.begin(method, arguments, phase)()

    def begin(self, method: str, arguments: Any, phase: str, hosts: Any = None) -> Any:
        """Call; the answers are there at once."""
        with self.answering():
            answers = []
            for rank, (calls, assemble, *contents) in enumerate(arguments):
                part = assemble(contents) if assemble else None
                span = Span(phase, time.time(), 0.0)
                answers.append([TimedResult(self._answer(c, part, rank), span) for c in calls])
        return lambda: answers

    @contextmanager
    def answering(self) -> Any:
        """Time inside is not the driver's."""
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start

    def _answer(self, call: Any, part: Any, rank: int) -> Any:
        role, _, method = call.name.partition(".")
        if method == "generate":
            return self._rollout(part)
        if method in ("compute_log_probs", "compute_values"):
            order = [i for mini in part.epochs[0] for micro in mini for i in micro]
            lengths = part.batch.responses.lengths[order]
            noise = self._noise[role == "ref"]
            return Ragged(noise[: int(lengths.sum())], lengths)
        if method == "reshard":
            (self._version,) = call.args
        return {"reshard": {"s": 0.0}, "sleep": None, "update": {f"{role}/loss": 0.0}}[method]

    def _rollout(self, requests: Requests) -> RolloutBatch:
        ids = requests.group_id
        sample = torch.arange(len(ids)) % EACH
        lengths = self._lengths[(ids * EACH + sample) % len(self._lengths)]
        total = int(lengths.sum())
        responses = Ragged(self._tokens[:total], lengths)
        return RolloutBatch(
            prompts=requests.prompts,
            responses=responses,
            response_mask=responses.like(self._mask[:total]),
            rollout_log_probs=responses.like(self._noise[0][:total]),
            group_id=ids,
            weight_version=torch.full_like(ids, self._version),
            truncated=lengths == CAP,
            engines=(EngineStats(total, 1.0, 1.0),),
        )


class Tokenizer:
    """Decodes to one word."""

    def decode(self, row: list[int], skip_special_tokens: bool) -> str:
        """The word."""
        return "token"


class Driver(Observer):
    """What the loop needs beside ranks: prompts, rewards, an observer, and no checkpoints."""

    def __init__(self, ranks: Ranks, config: RunConfig, keeps_batch: bool) -> None:
        self._ranks = ranks
        self.keeps_batch, self.batch = keeps_batch, None
        self.rows: list[Row] = []
        self.config = config
        self.steps: list[dict[str, float]] = []
        self.looking = lambda: 0.0  # CPU seconds that are not the driver's
        self._cpu = time.process_time()
        self.batch_bytes = 0
        self.failures = 0
        self.is_asked = False
        self.write_s = None
        self.taken = 0

    def take(self, count: int) -> list[Prompt]:
        """The next prompts."""
        first, self.taken = self.taken, self.taken + count
        return [Prompt(first + k, [1] * PROMPT_TOKENS, "", "", {}, {}) for k in range(count)]

    def score(self, prompts: list[Prompt], batch: RolloutBatch) -> Rewarded:
        """Every third response is right."""
        with self._ranks.answering():
            scores = [float(k % 3 == 0) for k in range(len(batch))]
            return Rewarded([""] * len(batch), scores, [])

    def observers(self, updates: Updates, guard: NonFiniteGuard) -> list[Observer]:
        """Health checks, this driver, and what notes the batch."""
        tokens = MarkedTokens(torch.tensor([1, 2]), torch.tensor([3, 4, 5]))
        prompts = PromptSets([], [], [])
        start = Start(self.config, Path(os.devnull), self.rows, prompts, Tokenizer(), print)
        health = HealthChecks(start, tokens)
        health.begin(updates.token_stats, str)
        return [health, self, guard]

    def after(self, record: StepRecord) -> StepRecord:
        """Keep the step's times and the size of its batch."""
        metrics = record.metrics
        self.rows.append(metrics)
        seconds = {k[5:-2]: v for k, v in metrics.items() if re.match(r"time/\w+_s$", k) and v}
        now = time.process_time() - self.looking()
        self.steps.append(seconds | {"cpu": now - self._cpu, "ranks": self._ranks.seconds})
        self._cpu = now
        self._ranks.seconds = 0.0
        if record.trained is not None:
            self.batch = record.trained.batch
            flat = [v.values if isinstance(v, Ragged) else v for v in self.batch.tensors().values()]
            self.batch_bytes = max(
                self.batch_bytes, sum({t.data_ptr(): t.nbytes for t in flat}.values())
            )
            if not self.keeps_batch:
                self.batch = None
        return record

    def evaluate(self, step: int, generate: Any, *, is_end: bool) -> Evaluation:
        """No metrics."""
        return Evaluation(0.0, {}, {})

    def is_due(self, step: int) -> bool:
        """No checkpoint."""
        return False

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def config_of(responses: int, steps: int, overrides: list[str]) -> RunConfig:
    """PPO with critic and reference on eight ranks, long responses."""
    return run_config(
        f"data.prompts_per_step={responses // EACH}",
        f"rollout.responses_per_prompt={EACH}",
        f"rollout.max_response_tokens={CAP}",
        f"rollout.max_prompt_tokens={PROMPT_TOKENS}",
        f"actor.mini_batch_size={responses // 4}",
        f"actor.max_tokens_per_gpu={CAP + PROMPT_TOKENS}",
        f"cluster.gpus_per_node={RANKS}",
        f"trainer.total_steps={steps}",
        "trainer.max_log_prob_diff=10",
        "trainer.save_final_model=false",
        *overrides,
    )


@dataclass(frozen=True)
class IdleConfig:
    """Names the worker."""

    worker: str = "tests.support.driver_step.Idle"


def train(config: RunConfig, responses: int, *, keeps_batch: bool = False) -> tuple[Driver, int]:
    """The run; and its peak of own memory."""
    ranks = Ranks(responses)
    driver = Driver(ranks, config, keeps_batch)
    names = ("actor", "critic", "rollout", "ref")
    groups = {name: WorkerGroup(ranks, name, IdleConfig()) for name in names}
    if not uses_critic(config):
        groups["critic"] = None
    workers = Workers(pool=ranks, reward_model=None, saver=None, **groups)
    parts = LoopParts(
        config=config,
        run_dir=Path("/nowhere"),
        shape=model_shape(read_model_config(config.model.path)),
        workers=workers,
        prompts=driver,
        generator=one_turn(config.rollout, partial(groups["rollout"].call, "generate")),
        rewards=driver,
        evaluator=driver,
        checkpoints=driver,
        preemption=driver,
        run=RunHandle(config, lambda responses: []),
        phase=lambda name: None,
        warn=lambda text: None,
        resume=None,
    )
    loop = build_loop(parts, driver.observers)
    before, found = private_bytes("RssAnon"), {}
    no_probes = patch.object(StartCheck, "sample")  # a script cannot answer them
    with no_probes, peak_in(found, "peak", "RssAnon") as driver.looking:
        loop.fit()
    return driver, found["peak"] - before


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--responses", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = config_of(args.responses, args.steps, args.overrides)
    driver, peak = train(config, args.responses)
    seconds = [
        {name: round(value, 3) for name, value in step.items()}
        | {
            "driver": round(step["step"] - step["ranks"], 3),
            "driver_cpu": round(step["cpu"] - step["ranks"], 3),
        }
        for step in driver.steps[1:]
    ]
    print(json.dumps({"steps": seconds, "peak": peak, "batch": driver.batch_bytes}))


if __name__ == "__main__":
    main()
