"""Metrics of the rollout engines, their places, and the alarm for one that falls behind."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from hybridrl.controller.placement import Host, Slot
from hybridrl.data.batch import EngineStats
from hybridrl.trainer.timing.engines import (
    QUIET,
    WINDOW,
    StragglerAlarm,
    engine_metrics,
    engine_place,
    straddling,
)


def engines(*tokens_per_second: float) -> list[EngineStats]:
    """Engines that sampled for ten seconds each."""
    return [EngineStats(int(10 * speed), 10.0, 0.5) for speed in tokens_per_second]


def alarm() -> StragglerAlarm:
    return StragglerAlarm(lambda engine: f"rank {engine} on node-a")


def after(steps: int, watch: StragglerAlarm, *tokens_per_second: float) -> list[str]:
    """All that is said in these steps."""
    return [text for _ in range(steps) for text in watch.warnings(engines(*tokens_per_second))]


def rollout_group(ranks_per_engine: int, *places: tuple[str, int]) -> SimpleNamespace:
    """What is known of a rollout group whose ranks are on these nodes and GPUs."""
    hosts = [
        Host(rank, None, Slot(f"id of {node}", "10.0.0.1", gpu), 100 + rank, node, Path("log"))
        for rank, (node, gpu) in enumerate(places)
    ]
    return SimpleNamespace(ranks_per_shard=ranks_per_engine, pool=SimpleNamespace(hosts=hosts))


@pytest.mark.parametrize(
    ("ranks_per_engine", "engine", "place"),
    [
        (1, 3, "rank 3 on node a GPU 3"),
        (2, 1, "ranks 2-3 on node a GPUs 2, 3"),
        (3, 1, "ranks 3-5 on node a GPU 3, node b GPUs 0, 2"),
    ],
    ids=["one GPU", "one node", "astride of two nodes"],
)
def test_the_place_of_an_engine_is_told_node_by_node(ranks_per_engine, engine, place):
    """GPU 1 of the second node is another run's."""
    places = [("a", 0), ("a", 1), ("a", 2), ("a", 3), ("b", 0), ("b", 2)]
    group = rollout_group(ranks_per_engine, *places)
    assert engine_place(group, engine) == place
    assert straddling(group) == (ranks_per_engine == 3)


def test_metrics_hand_worked():
    stats = [EngineStats(300, 2.0, 0.1), EngineStats(100, 2.0, 0.4), EngineStats(0, 0.0, 0.0)]
    assert engine_metrics(stats, seconds=4.0) == {
        "rollout/tokens_per_second": 100.0,
        "rollout/engine_tokens_per_second_min": 50.0,
        "rollout/engine_tokens_per_second_mean": 100.0,
        "rollout/engine_tokens_per_second_max": 150.0,
        "rollout/slowest_engine": 1.0,
        "rollout/first_token_s": 0.4,
        "rollout/engine_tokens_per_second_0": 150.0,
        "rollout/engine_tokens_per_second_1": 50.0,
    }
    assert engine_metrics([EngineStats(0, 0.0, 0.0)], seconds=1.0) == {}


def test_a_slow_engine_is_named_with_its_place_its_speed_and_the_median_of_the_others():
    (text,) = after(WINDOW, alarm(), 1000, 2600, 2400, 1250)
    assert "engine 0 (rank 0 on node-a) sampled 1,000 tokens/s" in text
    assert "the other engines 2,400 in the median" in text
    assert "below 0.5 of that" in text


def test_at_half_the_speed_nothing_is_said():
    assert after(10 * WINDOW, alarm(), 1000, 2000) == []


def test_a_step_at_full_speed_begins_the_count_anew():
    watch = alarm()
    assert after(WINDOW - 1, watch, 500, 2000) == []
    assert after(1, watch, 1500, 2000) == []
    assert after(WINDOW - 1, watch, 500, 2000) == []
    assert len(after(1, watch, 500, 2000)) == 1


def test_a_warning_is_repeated_only_after_a_while():
    watch = alarm()
    assert len(after(WINDOW, watch, 500, 2000)) == 1
    assert after(QUIET - 1, watch, 500, 2000) == []
    assert len(after(1, watch, 500, 2000)) == 1


def test_an_engine_without_prompts_is_no_straggler():
    assert after(10, alarm(), 0, 2000) == []
