"""On-policy means ratio 1: log-probs of the first mini-batch equal old_log_probs bit for bit."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from hybridrl.data.partition import partitioner_for
from hybridrl.distributed.mesh import build_mesh
from hybridrl.workers.actor import ActorWorker
from hybridrl.workers.critic import CriticWorker
from hybridrl.workers.reference import ReferenceWorker
from tests.support.launch import run_on_ranks
from tests.support.role_configs import actor_config, critic_config, fsdp_config, reference_config
from tests.support.tiny_hf import MORE, tiny_folder
from tests.support.training_batches import RESPONSES, scheduled, training_batch


def scored(dealt, worker_method):
    """A worker's per-token results of the whole batch, put together over the ranks."""
    ranks = dist.get_world_size()
    mine = worker_method(dealt.shard(ranks)[dist.get_rank()])
    parts = [None] * ranks
    dist.all_gather_object(parts, mine)
    return dealt.join(parts)


def two_steps(folder, replicas, shares, target):
    """Two steps of the loop; metrics of both, and log-probs before and after saving."""
    ranks = dist.get_world_size()
    spec = fsdp_config(ranks // replicas, replicas, share_prefixes=shares)
    mesh = build_mesh(spec, "cpu")
    actor = ActorWorker(actor_config(folder, spec), mesh)
    critic = CriticWorker(critic_config(folder, spec), mesh)
    reference = ReferenceWorker(reference_config(folder, spec), mesh)
    history = []
    for step in (1, 2):
        batch = training_batch()
        if shares:  # two prompts of four responses
            batch = replace(batch, prompts=batch.prompts.select([0, 0, 0, 0, 1, 1, 1, 1]))
        dealt = scheduled(
            batch,
            num_ranks=ranks,
            mini_batch_size=4,
            epochs=2,
            max_tokens=30,
            step=step,
            partition=partitioner_for(spec),
            share_prefixes=shares,
        )
        old_log_probs = scored(dealt, actor.compute_log_probs)
        ref_log_probs = scored(dealt, reference.compute_log_probs)
        values = scored(dealt, critic.compute_values)
        dealt = dealt.adding(
            old_log_probs=old_log_probs, ref_log_probs=ref_log_probs, values=values
        )
        mine = dealt.shard(ranks)[dist.get_rank()]
        metrics = critic.update(mine, step) | actor.update(mine, step, kl_coef=0.1)
        history.append((metrics, old_log_probs, ref_log_probs))
    actor.save(str(target))
    dist.barrier()  # rank 0 writes
    again = ActorWorker(actor_config(target, spec), mesh)
    now, saved = (scored(dealt, worker.compute_log_probs) for worker in (actor, again))
    return history, now, saved


@pytest.fixture(
    scope="module",
    params=[(1, 1, False), (2, 1, False), (2, 2, False), (2, 1, True)],
    ids=str,
)
def run(request, tmp_path_factory):
    ranks, replicas, shares = request.param
    root = tmp_path_factory.mktemp("ratio")
    folder = tiny_folder("qwen3", root / "model")
    return run_on_ranks(two_steps, ranks, folder, replicas, shares, root / "final")


def test_log_ratio_is_zero_first_and_not_after_an_update(run):
    for metrics, _, _ in run[0][0]:
        assert metrics["actor/first_log_ratio_max"] == 0.0
        assert metrics["actor/log_ratio_max"] > 1e-4


def test_an_untrained_actor_is_the_reference(run):
    (_, old, ref), (_, old_later, ref_later) = run[0][0]
    assert torch.equal(old.values, ref.values)
    assert not torch.equal(old_later.values, ref_later.values)
    torch.testing.assert_close(ref_later.values, ref.values, rtol=1e-5, atol=1e-5)


def test_every_rank_reports_the_same(run):
    for history, _, _ in run:
        assert [metrics for metrics, _, _ in history] == [metrics for metrics, _, _ in run[0][0]]


def test_metrics_are_plausible(run):
    for metrics, _, _ in run[0][0]:
        assert metrics["actor/lr"] == metrics["critic/lr"] == 1e-3
        assert metrics["actor/grad_norm"] > 0 and metrics["critic/grad_norm"] > 0
        assert metrics["actor/skipped_steps"] == 0
        # nearly uniform over 67 tokens
        assert 3.0 < metrics["actor/entropy"] < 4.21
        assert 0.9 < metrics["actor/ratio_mean"] < 1.1 < 1.0 + metrics["actor/ratio_max"]
        assert metrics["actor/kl_loss"] >= 0
        assert metrics["critic/loss"] > 0 and metrics["critic/explained_variance"] < 0.5


def test_what_was_saved_continues_bit_for_bit(run):
    for _, now, saved in run:
        assert len(now.values) == sum(RESPONSES)
        assert torch.equal(now.values, saved.values)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_every_family(name, tmp_path):
    folder = tiny_folder(name, tmp_path / "model")
    results = run_on_ranks(two_steps, 2, folder, 1, False, tmp_path / "final", time_limit_s=280)
    for history, now, saved in results:
        for metrics, _, _ in history:
            assert metrics["actor/first_log_ratio_max"] == 0.0
            assert metrics["actor/log_ratio_max"] > 1e-4
        assert torch.equal(now.values, saved.values)
