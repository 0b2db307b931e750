"""Ranks that share sequences compute what one rank computes alone: numbers, gradients, metrics.

Reference: the same workers on one rank, which other tests hold against transformers' own models.
"""

import pytest
import torch
import torch.distributed as dist

from hybridrl.distributed.forward.sequence_parallel import sequence_group
from tests.support.launch import run_on_ranks
from tests.support.sequence_cases import computed
from tests.support.tiny_hf import CONFIGS, MORE, RECURRENT, tiny_folder
from tests.support.whole_weights import relative_difference

CASES = {
    "qwen2": (2, {"dp_shard": 2, "ulysses_size": 2}),
    # fewer KV heads than ranks; shards that do not lie in the order of the ranks
    "qwen3": (
        4,
        {
            "dp_shard": 4,
            "ulysses_size": 4,
            "tensor_parallel_size": 2,
            "activation_checkpointing": True,
        },
    ),
    # two groups, each holding a copy of the weights
    "llama": (4, {"dp_shard": 2, "dp_replicate": 2, "ulysses_size": 2}),
}


def computed_alone(folders):
    return {name: computed(folder, {"dp_shard": 1}) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("sequence")
    return {name: tiny_folder(name, root / name) for name in CONFIGS}


@pytest.fixture(scope="module")
def alone(folders):
    return run_on_ranks(computed_alone, 1, folders)[0]


@pytest.fixture(scope="module", params=CASES)
def case(request, folders, alone):
    ranks, changes = CASES[request.param]
    return run_on_ranks(computed, ranks, folders[request.param], changes), alone[request.param]


def test_log_probs_and_values_are_those_of_one_rank(case):
    results, expected = case
    for numbers, *_ in results:
        for name, wanted in expected[0].items():
            torch.testing.assert_close(numbers[name], wanted, rtol=1e-5, atol=1e-5)


def test_gradients_are_those_of_one_rank(case):
    """However the tokens are cut: no factor for the ranks that computed the same loss."""
    results, expected = case
    for _, gradients, *_ in results:
        for budget, wanted in expected[1].items():
            assert relative_difference(gradients[budget], wanted) < 1e-5


def test_metrics_count_each_token_once(case):
    results, expected = case
    for *_, metrics, _ in results:
        assert metrics == results[0][2]
        assert metrics == pytest.approx(expected[2], rel=1e-4, abs=1e-5)


def test_first_log_ratio_is_zero(case):
    for *_, metrics, _ in case[0]:
        assert metrics["actor/first_log_ratio_max"] == 0.0
        assert metrics["actor/log_ratio_max"] > 1e-4


def test_roles_share_one_group(case):
    for *_, groups in case[0]:
        assert groups == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MORE if name not in RECURRENT])
def test_every_family(name, tmp_path):
    folder = tiny_folder(name, tmp_path / name)
    expected = run_on_ranks(computed, 1, folder, {"dp_shard": 1}, time_limit_s=280)[0]
    results = run_on_ranks(computed, 2, folder, CASES["qwen2"][1], time_limit_s=280)
    test_log_probs_and_values_are_those_of_one_rank((results, expected))
    test_gradients_are_those_of_one_rank((results, expected))


def groups_of_two():
    group = sequence_group(2)
    ranks = dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(group.name))
    return ranks, group.rank, sequence_group(1), sequence_group(2) == group


def test_groups_are_consecutive_ranks():
    results = run_on_ranks(groups_of_two, 4)
    assert [ranks for ranks, *_ in results] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [rank for _, rank, *_ in results] == [0, 1, 0, 1]
    assert all(no_group is None and same for *_, no_group, same in results)


def computed_and_graphs(folder, changes):
    return computed(folder, changes), torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
def test_compiled_layers_share_sequences_in_one_graph(folders, alone):
    """Both all-to-alls and their backward stay inside the layer's graph; lengths are symbols."""
    changes = {"dp_shard": 2, "ulysses_size": 2, "compile": True}
    results = run_on_ranks(computed_and_graphs, 2, folders["qwen2"], changes, time_limit_s=280)
    expected, expected_gradients, *_ = alone["qwen2"]
    for (numbers, gradients, metrics, _), num_graphs in results:
        for name, wanted in expected.items():
            torch.testing.assert_close(numbers[name], wanted, rtol=1e-5, atol=1e-5)
        for budget, wanted in expected_gradients.items():
            assert relative_difference(gradients[budget], wanted) < 1e-5
        assert metrics["actor/first_log_ratio_max"] == 0.0
        assert 1 <= num_graphs <= 4
