"""Metrics of the rollout engines, and their places."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from hybridrl.controller.placement import Host, Slot
from hybridrl.data.batch import EngineStats
from hybridrl.trainer.timing.engines import (
    engine_metrics,
    engine_place,
    rollout_metrics,
    straddling,
)
from tests.support.training_batches import training_batch


def rollout_group(ranks_per_engine: int, *places: tuple[str, int]) -> SimpleNamespace:
    """What is known of a rollout group whose ranks are on these nodes and GPUs."""
    hosts = [
        Host(rank, None, Slot(f"id of {node}", "10.0.0.1", gpu), 100 + rank, node, Path("log"))
        for rank, (node, gpu) in enumerate(places)
    ]
    return SimpleNamespace(ranks_per_shard=ranks_per_engine, hosts=hosts)


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


def test_a_step_whose_responses_were_all_finished_before_has_no_first_token():
    """With rollout.schedule=partial; greedy responses (remax) then come after the update."""
    batch = training_batch()
    late = replace(batch, engines=(EngineStats(10, 1.0, 0.25),))
    assert "rollout/switch_s" not in rollout_metrics(replace(batch, engines=()), 1.0, 0.5)
    assert rollout_metrics(late, 1.0, 0.5)["rollout/switch_s"] == 0.75
