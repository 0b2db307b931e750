"""Shards in tensor-parallel order and by columns: they lie where they are said to, and train alike.

Expected regions are cut out of the checkpoint by hand; training is compared with rows in rank
order, the plainest way to shard. tests/support/aligned_cases.py says what each rank does.
"""

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from hybridrl.distributed.weights import RandomWeights, first_vectors
from tests.support.aligned_cases import COLUMNS, ORDERS, look
from tests.support.launch import run_on_ranks
from tests.support.tiny_hf import tiny_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tied, with biases, and a vocabulary that no number of ranks divides."""
    return tiny_folder("qwen2", tmp_path_factory.mktemp("aligned") / "qwen2")


@pytest.fixture(scope="module")
def seen_on(folder):
    """What all ranks saw; one start of the processes serves all cases of a size."""
    results = {}

    def of(ranks):
        if ranks not in results:
            copies = [replicas for size, replicas in ORDERS if size == ranks]
            results[ranks] = run_on_ranks(look, ranks, folder, copies, "cpu")
        return results[ranks]

    return of


@pytest.fixture(
    params=[pytest.param(k, marks=pytest.mark.slow) if k[0] > 4 else k for k in ORDERS],
    ids="{0[0]} ranks, {0[1]} copies".format,
)
def seen(request, seen_on):
    ranks, replicas = request.param
    return ORDERS[request.param], [one[replicas] for one in seen_on(ranks)]


def test_process_groups_have_the_order_of_the_shards(seen):
    orders, by_rank = seen
    for rank, one in enumerate(by_rank):
        mine = next(order for order in orders if rank in order)
        assert one["order"] == mine
        assert one["shard"] == one["sliced"] == mine.index(rank)
        assert one["copies"] == [order[mine.index(rank)] for order in orders]


def test_each_rank_holds_its_part_of_the_checkpoint(seen, folder):
    orders, by_rank = seen
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = dict(model.named_parameters(remove_duplicate=False))
    for rank, one in enumerate(by_rank):
        order = next(order for order in orders if rank in order)
        assert one["shards"].keys() == expected.keys()
        assert one["contiguous"]
        for name, (shape, dim, local) in one["shards"].items():
            assert (shape, dim) == (tuple(expected[name].shape), int(name in COLUMNS))
            parts = expected[name].chunk(len(order), dim)
            shard = order.index(rank)
            part = parts[shard] if shard < len(parts) else expected[name][:0]
            assert torch.equal(local, part), (name, rank)


def test_a_shard_lies_inside_the_slice_that_its_rank_needs(seen, folder):
    """Rank r is the (r mod tp)-th of its engine; every engine here has 2 ranks."""
    _, by_rank = seen
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name in (COLUMNS[0], "model.layers.1.self_attn.q_proj.weight"):
        weight = dict(model.named_parameters())[name]
        for rank, one in enumerate(by_rank):
            _, dim, local = one["shards"][name]
            needed = weight.chunk(2, dim)[rank % 2]
            offsets = range(0, needed.shape[dim], local.shape[dim])
            assert any(
                torch.equal(needed.narrow(dim, start, local.shape[dim]), local) for start in offsets
            )


def test_gathered_weights_are_whole(seen, folder):
    _, by_rank = seen
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, wanted in model.named_parameters():
        assert torch.equal(by_rank[0]["full"][name], wanted), name
    for one in by_rank:
        assert torch.equal(one["gathered"], torch.arange(16.0).view(2, 8))
    assert not any(one["full"] for one in by_rank[1:])


def test_the_critic_is_cut_like_the_policy(seen, folder):
    _, by_rank = seen
    backbone = AutoModel.from_pretrained(folder, dtype=torch.float32)
    for one in by_rank:
        for name, wanted in backbone.named_parameters():
            assert torch.equal(one["critic"][name], wanted), name
            assert one["critic_cut"][name] == int(f"model.{name}" in COLUMNS)


def test_training_is_that_of_rows_in_rank_order(seen):
    """Sums are taken in another order, so a few roundings differ; the gradient is the same."""
    _, by_rank = seen
    (plain_norms, plain), (norms, aligned) = by_rank[0]["trained"]
    assert norms == pytest.approx(plain_norms, rel=1e-5)
    start = by_rank[0]["full"]
    for name, wanted in plain.items():
        assert not torch.equal(start[name], wanted), "the updates must move every weight"
        torch.testing.assert_close(aligned[name], wanted, rtol=0, atol=2e-6)


def test_columns_given_by_hand_must_be_there_and_divide(seen):
    _, by_rank = seen
    for one in by_rank:
        unknown, norm = one["refused"]
        assert "fsdp.columns = nowhere names no weight" in unknown
        assert "model.norm.weight names a weight of (32,)" in norm
        assert "Set fsdp.columns=null" in unknown


def test_random_weights_depend_on_seed_and_name_alone(seen, folder):
    """All layouts and ranks draw the same; the critic's backbone is the actor's."""
    _, by_rank = seen
    alone = one_process_weights(folder)
    for one in by_rank:
        for actor, critic in one["random"]:
            assert actor.keys() == (alone.keys() if one is by_rank[0] else set())
            assert all(torch.equal(actor[name], alone[name]) for name in actor)
            assert all(torch.equal(critic[name], alone[f"model.{name}"]) for name in critic)


def one_process_weights(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    shapes = {name: param.shape for name, param in model.named_parameters()}
    drawn = RandomWeights(shapes, 0.02, 11, torch.device("cpu"), first_vectors(model, shapes, 11))
    return {name: drawn[name] for name in shapes}


def test_older_torch_can_be_kept_from_sorting_ranks(seen_on):
    """torch 2.13 sorts unless told otherwise, older ones always, both in the same way."""
    assert [one["groups"] for one in seen_on(2)] == [[[1, 0], [0, 1]]] * 2
