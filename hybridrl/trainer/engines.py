"""How the rollout engines fared: their metrics, and an alarm for one that falls behind."""

from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean

from hybridrl.controller.worker_group import WorkerGroup
from hybridrl.data.batch import EngineStats

# Rollouts over which an engine's speed is taken, so that one hiccup raises no alarm.
WINDOW = 3
# Rollouts before the same engine is warned of again.
QUIET = 50


def engine_metrics(engines: Sequence[EngineStats], seconds: float) -> dict[str, float]:
    """Speeds of all engines and of those that had prompts, the slowest, the last first token.

    Args:
        engines: how each fared, over all rounds of the step.
        seconds: of the whole phase.
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
    }


class StragglerAlarm:
    """Warns of an engine that samples much slower than the fastest one.

    Args:
        ratio: share of the fastest engine's tokens per second below which to warn; 0: never.
        where: engine index -> the ranks and node it runs on, for the warning.
    """

    def __init__(self, ratio: float, where: Callable[[int], str]) -> None:
        self._ratio = ratio
        self._where = where
        self._last: deque[Sequence[EngineStats]] = deque(maxlen=WINDOW)
        self._quiet: dict[int, int] = {}

    def warnings(self, engines: Sequence[EngineStats]) -> list[str]:
        """Take in one rollout; what to tell the user, mostly nothing."""
        self._last.append(engines)
        self._quiet = {k: left - 1 for k, left in self._quiet.items() if left > 1}
        if len(self._last) < WINDOW:
            return []
        speeds = self._speeds()
        fastest = max(speeds.values(), default=0.0)
        slow = [k for k in speeds if speeds[k] < self._ratio * fastest and k not in self._quiet]
        self._quiet |= dict.fromkeys(slow, QUIET)
        return [
            f"rollout engine {k} ({self._where(k)}) sampled {speeds[k]:,.0f} tokens/s over the "
            f"last {WINDOW} rollouts, below rollout.straggler_ratio = {self._ratio:g} of the "
            f"fastest engine's {fastest:,.0f}. The others wait for it; look for another process "
            f"on its GPU, a hot or throttled GPU, or a busy host."
            for k in slow
        ]

    def _speeds(self) -> dict[int, float]:
        """Tokens per second over the window, of the engines that sampled in all its rollouts."""
        speeds = {}
        for k, parts in enumerate(zip(*self._last, strict=True)):
            if all(part.tokens for part in parts):
                speeds[k] = sum(p.tokens for p in parts) / sum(p.seconds for p in parts)
        return speeds


def engine_place(rollout: WorkerGroup, engine: int) -> str:
    """The ranks of an engine and their node, for messages: 'ranks 2-3 on node-a'."""
    per_engine = rollout.ranks_per_shard
    first, last = engine * per_engine, (engine + 1) * per_engine - 1
    ranks = f"rank {first}" if first == last else f"ranks {first}-{last}"
    return f"{ranks} on {rollout.pool.hosts[first].node_name}"
