"""Rollout engines: metrics of a step's rollout, places of engines."""

from collections.abc import Sequence
from statistics import fmean

import torch

from hybridrl.controller.placement import by_node, straddling_engines
from hybridrl.controller.worker_group import WorkerGroup
from hybridrl.data.batch import EngineStats, RolloutBatch
from hybridrl.trainer.timing.throughput import RESPONSES, TOKENS


def rollout_metrics(
    batch: RolloutBatch, seconds: float, switch_s: float | None
) -> dict[str, float | None]:
    """Compute metrics of a step's responses, engines and turns; for times see `Phases`."""
    metrics = response_metrics(batch) | engine_metrics(batch.engines, seconds)
    if switch_s is not None and batch.engines:  # else all responses had been finished before
        first_token_s = max(engine.first_token_s for engine in batch.engines)
        metrics["rollout/switch_s"] = switch_s + first_token_s
    return dict(metrics | turn_metrics(batch))


def response_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Count tokens and token sequences, and measure responses; an agent's are its episodes."""
    episodes = batch.by_episode()
    lengths = episodes.responses.lengths.float()
    return {
        TOKENS: float(int(batch.prompts.lengths.sum()) + lengths.sum()),
        RESPONSES: float(len(batch)),
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "response/truncated_fraction": float(episodes.truncated.float().mean()),
    }


def turn_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Compute metrics of multi-turn responses; none without an environment or agent."""
    if batch.conversation is None:
        return {}
    count = len(batch.last_of_episodes)
    turns = torch.zeros(count).index_add(0, batch.episode_index, batch.conversation.turns.float())
    branches = {} if batch.episode is None else {"agent/branches": len(batch) / count - 1}
    return branches | {
        "rollout/turns_mean": float(turns.mean()),
        "rollout/turns_max": float(turns.max()),
        "environment/tokens_mean": float((~batch.response_mask.values).sum()) / count,
        "environment/seconds": batch.environment_s,
    }


def engine_metrics(engines: Sequence[EngineStats], seconds: float) -> dict[str, float]:
    """Compute speeds of all engines and of each with prompts, and the last first token.

    `engines` has the sums over all rounds of the step, which took `seconds`.
    """
    speeds = {k: engine.tokens_per_second for k, engine in enumerate(engines) if engine.tokens}
    if not speeds:
        return {}
    return {
        "rollout/tokens_per_second": sum(engine.tokens for engine in engines) / seconds,
        "rollout/engine_tokens_per_second_min": min(speeds.values()),
        "rollout/engine_tokens_per_second_mean": fmean(speeds.values()),
        "rollout/engine_tokens_per_second_max": max(speeds.values()),
        "rollout/slowest_engine": float(min(speeds, key=lambda k: speeds[k])),
        "rollout/first_token_s": max(engine.first_token_s for engine in engines),
        **{f"rollout/engine_tokens_per_second_{k}": speed for k, speed in speeds.items()},
    }


def engine_place(rollout: WorkerGroup, engine: int) -> str:
    """Describe an engine's ranks and GPUs: 'ranks 3-4 on node a GPU 3, node b GPU 0'."""
    per_engine = rollout.ranks_per_shard
    hosts = rollout.hosts[engine * per_engine : (engine + 1) * per_engine]
    first, last = hosts[0].rank, hosts[-1].rank
    ranks = f"rank {first}" if first == last else f"ranks {first}-{last}"
    places = []
    for there in by_node(hosts).values():
        gpus = ", ".join(str(host.slot.local_rank) for host in there)
        places.append(f"node {there[0].node_name} GPU{'s' * (len(there) > 1)} {gpus}")
    return f"{ranks} on {', '.join(places)}"


def straddling(rollout: WorkerGroup) -> int:
    """Count engines whose ranks are on several nodes (placement.allow_straddle)."""
    slots = [host.slot for host in rollout.hosts]
    return len(straddling_engines(slots, rollout.ranks_per_shard))
