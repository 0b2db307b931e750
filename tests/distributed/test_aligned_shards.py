"""Shards in tensor-parallel order and by columns: they lie where they are said to, and train alike.

Expected regions are cut out of the checkpoint by hand; training is compared with rows in rank
order, the plainest way to shard.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoModel, AutoModelForCausalLM

from hybridrl.config.schema import Init, Layout
from hybridrl.distributed.fsdp import (
    full_state_dict,
    load_sharded_critic,
    load_sharded_policy,
    named_shards,
)
from hybridrl.distributed.mesh import build_mesh, ranks_as_given
from hybridrl.distributed.weights import RandomWeights
from hybridrl.workers.actor import ActorWorker
from tests.distributed.launch import run_on_ranks
from tests.role_configs import actor_config, fsdp_config, model_config
from tests.tiny_hf import tiny_folder
from tests.training_batches import scheduled, training_batch

COLUMNS = [
    f"model.layers.{layer}.{name}.weight"
    for layer in range(2)
    for name in ("self_attn.o_proj", "mlp.down_proj")
]
# (ranks, dp_replicate), tp 2 -> the ranks of each copy in the order of their shards
ORDERS = {
    (2, 1): [[0, 1]],
    (4, 1): [[0, 2, 1, 3]],
    (4, 2): [[0, 1], [2, 3]],
    (8, 2): [[0, 2, 1, 3], [4, 6, 5, 7]],
}
TP = 2


def specs(replicas):
    shards = dist.get_world_size() // replicas
    plain = fsdp_config(shards, replicas, tensor_parallel_size=TP, layout=Layout.plain)
    aligned = fsdp_config(shards, replicas, tensor_parallel_size=TP, columns=COLUMNS)
    return plain, aligned


def look(folder, numbers_of_copies):
    """Everything the tests compare, of this rank, by the number of copies of the weights."""
    seen = {replicas: look_at(folder, replicas) for replicas in numbers_of_copies}
    return seen | {"groups": groups_of_older_torch()}


def groups_of_older_torch():
    """The ranks of a group made where torch is kept from sorting, and of one made after it."""
    with ranks_as_given():
        backwards = dist.new_group([1, 0])
    return [
        dist.get_process_group_ranks(group)
        for group in (backwards, dist.new_group([1, 0]))
        if group is not dist.GroupMember.NON_GROUP_MEMBER
    ]


def look_at(folder, replicas):
    plain, aligned = specs(replicas)
    mesh = build_mesh(aligned, "cpu")
    policy = load_sharded_policy(model_config(folder), aligned, mesh, 7)
    critic = load_sharded_critic(model_config(folder), aligned, mesh, seed=3)
    whole = torch.arange(16.0).view(2, 8)
    return {
        "order": dist.get_process_group_ranks(mesh.get_group("dp_shard")),
        "copies": dist.get_process_group_ranks(mesh.get_group("dp_replicate")),
        "shard": mesh.get_local_rank("dp_shard"),
        "sliced": mesh["dp_shard"].get_local_rank(),
        "shards": {s.name: (s.shape, s.dim, s.local().clone()) for s in named_shards(policy)},
        "contiguous": all(s.local().is_contiguous() for s in named_shards(policy)),
        "full": full_state_dict(policy),
        "critic": {n: p.detach().full_tensor() for n, p in critic.backbone.named_parameters()},
        "critic_cut": {n: p.placements[-1].dim for n, p in critic.backbone.named_parameters()},
        "gathered": distribute_tensor(whole, mesh["dp_shard"], [Shard(1)]).full_tensor(),
        "random": random_weights(folder, [plain, aligned]),
        "trained": [train(folder, spec) for spec in (plain, aligned)],
    }


def random_weights(folder, layouts):
    """Of actor and critic, by layout: on all ranks the critic's, on rank 0 the actor's."""
    found = []
    for spec in layouts:
        mesh = build_mesh(spec, "cpu")
        model = model_config(folder, Init.random, seed=11)
        actor = full_state_dict(load_sharded_policy(model, spec, mesh, 7))
        critic = load_sharded_critic(model, spec, mesh, seed=3)
        critic = {n: p.detach().full_tensor() for n, p in critic.backbone.named_parameters()}
        found.append((actor, critic))
    return found


def train(folder, spec):
    """Weights and gradient norm after two updates of clipped AdamW steps."""
    ranks = dist.get_world_size()
    actor = ActorWorker(actor_config(folder, spec), build_mesh(spec, "cpu"))
    sizes = {"num_ranks": ranks, "mini_batch_size": max(4, ranks), "max_tokens": 30}
    dealt = scheduled(training_batch(), **sizes)
    mine = dealt.shard(ranks)[dist.get_rank()]
    norms = [actor.update(mine, step=step, kl_coef=0.1)["actor/grad_norm"] for step in (1, 2)]
    return norms, full_state_dict(actor.model)


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
            results[ranks] = run_on_ranks(look, ranks, folder, copies)
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
    draw = RandomWeights(0.02, 11, torch.device("cpu"))
    return {name: draw(name, param.shape) for name, param in model.named_parameters()}


def test_older_torch_can_be_kept_from_sorting_ranks(seen_on):
    """torch 2.13 sorts unless told otherwise, older ones always, both in the same way."""
    assert [one["groups"] for one in seen_on(2)] == [[[1, 0], [0, 1]]] * 2
