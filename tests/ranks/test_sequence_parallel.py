"""Ranks that share sequences compute what one rank computes alone: numbers, gradients, metrics.

Reference: the same workers on one rank, which other tests hold against transformers' own models.
"""

import pytest
import torch
import torch.distributed as dist

from hybridrl.distributed.forward.sequence_parallel import sequence_group
from hybridrl.distributed.mesh import build_mesh
from hybridrl.workers.actor import ActorWorker
from hybridrl.workers.critic import CriticWorker
from hybridrl.workers.reference import ReferenceWorker
from hybridrl.workers.training import Training
from tests.support.launch import run_on_ranks
from tests.support.role_configs import actor_config, critic_config, fsdp_config, reference_config
from tests.support.tiny_hf import CONFIGS, MORE, tiny_folder
from tests.support.training_batches import PROMPTS, RESPONSES, scheduled, training_batch
from tests.support.whole_weights import relative_difference

# Each response alone, down to one of 3 tokens for 4 ranks; several together; all in one.
BUDGETS = (1, 40, sum(PROMPTS) + sum(RESPONSES))
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


class Run:
    """Actor, critic and reference of a model on this rank, and what they compute."""

    def __init__(self, folder, spec, device_type):
        mesh = build_mesh(spec, device_type)
        self.actor = ActorWorker(actor_config(folder, spec), mesh)
        self.critic = CriticWorker(critic_config(folder, spec), mesh)
        self.reference = ReferenceWorker(reference_config(folder, spec), mesh)
        self.actor.kl_coef = 0.1
        self.shards = dist.get_world_size() // ActorWorker.ranks_per_shard(self.actor.config)
        self.shard = dist.get_rank() * self.shards // dist.get_world_size()

    def dealt(self, batch, mini_batch_size, max_tokens):
        return scheduled(
            batch, num_ranks=self.shards, mini_batch_size=mini_batch_size, max_tokens=max_tokens
        )

    def per_token(self, dealt, worker_method):
        """Results of the first rank of each group, in the order of the batch."""
        results = [None] * dist.get_world_size()
        dist.all_gather_object(results, worker_method(dealt.shard(self.shards)[self.shard]))
        return dealt.join(results[:: len(results) // self.shards])

    def gradients(self, worker, loss, max_tokens):
        (mini,) = (
            self.dealt(training_batch(), 8, max_tokens)
            .shard(self.shards)[self.shard]
            .mini_batches()
        )
        training = Training(worker.optimizer, loss, worker.config.fsdp)
        training.accumulate_gradients(*mini)
        named = worker.model.named_parameters()
        full = {name: p.grad.full_tensor().cpu() for name, p in named}
        worker.optimizer.adamw.zero_grad()
        return full

    def step(self):
        """Old log-probs, then metrics of an update with them."""
        batch = training_batch()
        dealt = self.dealt(batch, 4, 30)
        old_log_probs = self.per_token(dealt, self.actor.compute_log_probs)
        mine = self.dealt(batch.adding(old_log_probs=old_log_probs), 4, 30).shard(self.shards)
        mine = mine[self.shard]
        return self.actor.update(mine, 1, kl_coef=0.1) | self.critic.update(mine, 1)


def computed(folder, changes, device_type="cpu"):
    """What a rank has to show: numbers by name, gradients by token budget, metrics, groups."""
    run = Run(folder, fsdp_config(**changes), device_type)
    alone = run.dealt(training_batch(), 8, 1)
    numbers = {
        "log_probs": run.per_token(alone, run.actor.compute_log_probs).values,
        "values": run.per_token(alone, run.critic.compute_values).values,
        "ref_log_probs": run.per_token(alone, run.reference.compute_log_probs).values,
    }
    gradients = {
        budget: run.gradients(run.actor, run.actor.policy_loss, budget)
        | run.gradients(run.critic, run.critic.value_loss, budget)
        for budget in BUDGETS
    }
    same_group = {run.actor.sequence_group, run.critic.sequence_group}
    return numbers, gradients, run.step(), len(same_group)


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
@pytest.mark.parametrize("name", MORE)
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
