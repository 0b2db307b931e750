"""What does it cost the driver to send a step's batch to the workers and to take results back?

Question   How long does a step keep the GPUs waiting for data that travels?
Workload   Real Ray and real worker processes whose methods do nothing: generation returns ready
           responses, scoring and updates return at once. One step: responses arrive, the batch
           is scheduled and scored (old log-probs, reference, values), advantages are added,
           critic and actor are updated; 1,024 responses of 512 tokens by default.
Measures   Milliseconds of each part on the driver's clock, and `all` of them, the time that a
           step waits; of these the CPU time of the driver's thread. `nothing` is a call without
           data. Against them `each_call`: scores and updates alone, with every part of the batch
           cut and sent anew in each of five calls.
Run        python benchmarks/transport.py --ranks 2         (CPU, half a minute)
           python benchmarks/transport.py --small

Prints one JSON line; append it to benchmarks/results/transport.jsonl.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from configs import composed
from timing import min_median_max, result

from hybridrl.config.planner.world import slots_on_nodes
from hybridrl.controller.pool import Pool, PoolConfig
from hybridrl.controller.ray.runtime import ray_runtime
from hybridrl.controller.worker_group import Call, WorkerGroup, build_roles, call_together
from hybridrl.data.batch import EngineStats, RolloutBatch
from hybridrl.data.partition import partition_by_micro_batch
from hybridrl.data.ragged import Ragged
from hybridrl.data.requests import Request, Requests, SamplingParams
from hybridrl.data.schedule import RankBatch, ScheduledBatch, UpdateSizes, schedule
from hybridrl.data.shardable import Piece, Shardable
from hybridrl.workers.base import Dispatch, Worker, on_all_ranks

PROMPT_TOKENS, RESPONSES_PER_PROMPT, MINI_BATCH_SHARE = 100, 4, 4


@dataclass(kw_only=True)
class IdleConfig:
    """Names the worker; `tokens` is the length of its responses."""

    worker: str = "transport.Idle"
    tokens: int = 512


class Idle(Worker):
    """A role of any kind whose methods return at once what they must."""

    config_class = IdleConfig  # type: ignore[assignment]

    @on_all_ranks(Dispatch.SHARD_DP)
    def generate(self, requests: Requests) -> RolloutBatch:
        """Responses of zeros; made anew, which is not the driver's work but is waited for."""
        ids = requests.group_id
        lengths = torch.full((len(ids),), self.config.tokens)
        tokens = torch.zeros(int(lengths.sum()), dtype=torch.int32)
        responses = Ragged(tokens, lengths)
        return RolloutBatch(
            prompts=requests.prompts,
            responses=responses,
            response_mask=responses.like(torch.ones_like(tokens).bool()),
            rollout_log_probs=responses.like(tokens.float()),
            group_id=ids,
            weight_version=torch.zeros_like(ids),
            truncated=torch.zeros_like(ids).bool(),
            engines=(EngineStats(len(tokens), 1.0, 1.0),),
        )

    @on_all_ranks(Dispatch.SHARD_DP)
    def score(self, batch: RankBatch) -> Ragged:
        """A zero for every token of the first epoch."""
        order = torch.tensor([i for mini in batch.epochs[0] for micro in mini for i in micro])
        lengths = batch.batch.responses.lengths[order]
        return Ragged(torch.zeros(int(lengths.sum())), lengths)

    @on_all_ranks(Dispatch.SHARD_DP_REDUCED)
    def update(self, batch: RankBatch) -> dict[str, float]:
        """A metric."""
        return {"loss": float(len(batch.batch))}

    @on_all_ranks(Dispatch.BROADCAST)
    def nothing(self) -> None:
        """Nothing."""


class Anew(Shardable):
    """A scheduled batch that is cut and sent whole in every call."""

    def __init__(self, scheduled: ScheduledBatch) -> None:
        self.scheduled = scheduled

    assemble = staticmethod(ScheduledBatch.assemble)

    def pieces(self, num_shards: int) -> Sequence[Sequence[Piece]]:
        """The ranks' batches, cut now."""
        return ScheduledBatch.of(self.scheduled.batch, self.scheduled.ranks).pieces(num_shards)

    def join(self, results: Sequence[Any]) -> Any:
        """As the scheduled batch does."""
        return self.scheduled.join(results)


class Parts:
    """Milliseconds of each part of a step, step by step: of the clock and of the driver's CPU."""

    def __init__(self) -> None:
        self.ms: dict[str, list[float]] = defaultdict(list)
        self.cpu_ms: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time a part."""
        start, cpu = time.perf_counter(), time.thread_time()
        yield
        self.cpu_ms[name].append(1e3 * (time.thread_time() - cpu))
        self.ms[name].append(1e3 * (time.perf_counter() - start))

    def whole_steps(self, ms: dict[str, list[float]]) -> list[float]:
        """The sums of the parts that belong to a step, step by step."""
        own = [values for name, values in ms.items() if name not in ("nothing", "each_call")]
        return [sum(step) for step in zip(*own, strict=True)]


def pool_config(ranks: int, folder: Path) -> PoolConfig:
    """A pool of CPU workers as the program's own config makes it."""
    config = composed({"hardware": "cpu", "cluster.gpus_per_node": ranks})
    return PoolConfig(
        cluster=config.cluster,
        slots_on_nodes=slots_on_nodes(config),
        accelerator=config.hardware.accelerator,
        fsdp=config.fsdp,
        ahead=[],
        modules=["transport"],
        log_folder=folder / "logs",
    )


def requests_for(responses: int) -> Requests:
    """Requests for so many responses."""
    params, ids = SamplingParams(1.0), torch.arange(responses) // RESPONSES_PER_PROMPT
    prompts = [[1] * PROMPT_TOKENS for _ in range(responses // RESPONSES_PER_PROMPT)]
    requests = [
        Request(str(k), prompts[group], k, 512, params) for k, group in enumerate(ids.tolist())
    ]
    return Requests(requests, ids, RESPONSES_PER_PROMPT)


def one_step(
    groups: dict[str, WorkerGroup], prompts: Requests, tokens: int, step: int, parts: Parts
) -> None:
    """A step's traffic as the trainer makes it, then its scores and updates with data sent anew."""
    actor, critic, ref = (groups[name] for name in ("actor", "critic", "ref"))
    with parts.part("nothing"):
        actor.call("nothing")
    with parts.part("rollout"):
        batch = groups["rollout"].call("generate", prompts)
    sizes = UpdateSizes(
        num_shards=actor.num_shards,
        mini_batch_size=len(batch) // MINI_BATCH_SHARE,
        epochs=1,
        max_tokens=32 * (tokens + PROMPT_TOKENS),
        cost=float,
        partition=partition_by_micro_batch,
    )
    with parts.part("schedule"):
        scheduled = schedule(batch, sizes, seed=1, step=step)
    scores = {
        "old_log_probs": Call(actor, "score"),
        "ref_log_probs": Call(ref, "score"),
        "values": Call(critic, "score"),
    }
    with parts.part("score"):
        found = call_together(scores, scheduled)
        scheduled = scheduled.adding(**{name: outcome.value for name, outcome in found.items()})
    new = batch.rollout_log_probs
    with parts.part("adding"):
        scheduled = scheduled.adding(advantages=new, returns=new)
    with parts.part("update"):
        call_together({"critic": Call(critic, "update"), "actor": Call(actor, "update")}, scheduled)
    with parts.part("each_call"):
        for call in (*scores.values(), Call(critic, "update"), Call(actor, "update")):
            call_together({"": call}, Anew(scheduled))


def measure(config: PoolConfig, responses: int, tokens: int, steps: int) -> Parts:
    """The parts' times in `steps` steps, after two that are not counted."""
    parts = Parts()
    with ray_runtime(config.cluster, config.accelerator), Pool(config).join() as pool:
        names = ("rollout", "actor", "critic", "ref")
        groups = build_roles(pool, {name: IdleConfig(tokens=tokens) for name in names})
        prompts = requests_for(responses)
        for step in range(-2, steps):
            one_step(groups, prompts, tokens, step, parts if step >= 0 else Parts())
    return parts


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--responses", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--small", action="store_true", help="64 responses of 32 tokens, 3 steps")
    args = parser.parse_args()
    if args.small:
        args.responses, args.tokens, args.steps = 64, 32, 3
    with tempfile.TemporaryDirectory() as folder:
        config = pool_config(args.ranks, Path(folder))
        parts = measure(config, args.responses, args.tokens, args.steps)
    parts.ms["all"] = parts.whole_steps(parts.ms)
    settings = {"ranks": args.ranks, "responses": args.responses, "tokens": args.tokens}
    measured = {
        "ms_min_median_max": {name: min_median_max(ms, digits=1) for name, ms in parts.ms.items()},
        "driver_cpu_ms_min_median_max": min_median_max(parts.whole_steps(parts.cpu_ms), digits=1),
        "times_each_call": round(
            statistics.median(parts.ms["each_call"]) / statistics.median(parts.ms["all"]), 2
        ),
    }
    print(json.dumps(result("transport", settings, measured)))


if __name__ == "__main__":
    main()
