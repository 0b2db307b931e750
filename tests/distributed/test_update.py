"""Updates at the edges: losses that are not finite, mini-batches without a token, clipping."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from hybridrl.distributed.fsdp import full_state_dict
from hybridrl.distributed.mesh import build_mesh
from hybridrl.workers.actor import ActorWorker
from hybridrl.workers.critic import CriticWorker
from tests.distributed.launch import run_on_ranks
from tests.role_configs import actor_config, critic_config, fsdp_config
from tests.tiny_hf import tiny_folder
from tests.training_batches import scheduled, training_batch


def my_part(batch):
    ranks = dist.get_world_size()
    dealt = scheduled(batch, num_ranks=ranks, mini_batch_size=4, max_tokens=30)
    return dealt.shard(ranks)[dist.get_rank()]


def changed(before, after):
    return {name for name in before if not torch.equal(before[name], after[name])}


class LossIsNaNOnOneRank(ActorWorker):
    """Rank 1 adds NaN to its loss, which no gradient shows."""

    odd = True

    def policy_loss(self, micro, totals):
        loss, stats = super().policy_loss(micro, totals)
        return loss + (float("nan") if self.odd and dist.get_rank() == 1 else 0.0), stats


def state_of(worker):
    """This rank's weights and moments, copied."""
    optimizer = worker.optimizer
    tensors = [*optimizer.parameters]
    for state in optimizer.adamw.state.values():
        tensors += [state[name] for name in ("exp_avg", "exp_avg_sq", "step")]
    return [getattr(t.detach(), "_local_tensor", t.detach()).clone() for t in tensors]


def same(ours, theirs):
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def skipped_update(folder, mesh, spec):
    """An actor that meets odd updates between two plain ones, and one that meets the plain ones."""
    odd, plain = (LossIsNaNOnOneRank(actor_config(folder, spec), mesh) for _ in range(2))
    batch = my_part(training_batch())
    poisoned = training_batch().advantages.values.clone()
    poisoned[:] = float("inf")
    no_advantage = replace(training_batch(), advantages=training_batch().responses.like(poisoned))
    odd.odd = plain.odd = False
    for actor in (odd, plain):
        actor.update(batch, step=1, kl_coef=0.1)
    before = state_of(odd)
    odd.odd = True
    metrics = odd.update(batch, step=2, kl_coef=0.1)
    odd.odd = False
    more = odd.update(my_part(no_advantage), step=2, kl_coef=0.1)
    unchanged = same(before, state_of(odd))
    for actor in (odd, plain):
        actor.update(batch, step=3, kl_coef=0.1)
    return {
        "metrics": [metrics, more],
        "unchanged": unchanged,
        "changed_later": not same(before, state_of(odd)),
        "as_if_nothing": same(state_of(odd), state_of(plain)),
    }


def odd_updates(folder):
    """Metrics, and names of the weights that changed, of one odd update after the other."""
    spec = fsdp_config(dp_shard=dist.get_world_size())
    mesh = build_mesh(spec, "cpu")
    actor = ActorWorker(actor_config(folder, spec), mesh)
    critic = CriticWorker(critic_config(folder, spec), mesh)
    batch = training_batch()
    mask = batch.response_mask
    poisoned = batch.advantages.values.clone()
    poisoned[0] = float("nan")
    batches = {
        "poisoned": replace(batch, advantages=mask.like(poisoned)),
        "masked": replace(batch, response_mask=mask.like(torch.zeros_like(mask.values))),
        "plain": batch,
    }
    found = {}
    weights = full_state_dict(actor.model)
    for name, odd in batches.items():
        metrics = actor.update(my_part(odd), step=1, kl_coef=0.1)
        later = full_state_dict(actor.model)
        found[name] = (metrics, changed(weights, later))
        weights = later
    found["critic"] = critic.update(my_part(batches["masked"]), step=1)
    found["skipped"] = skipped_update(folder, mesh, spec)
    return found


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory):
    folder = tiny_folder("llama", tmp_path_factory.mktemp("update") / "llama")
    return run_on_ranks(odd_updates, 2, folder)


@pytest.fixture
def found(on_ranks):
    return on_ranks[0]


def test_a_loss_that_is_nan_on_one_rank_skips_the_step_on_both(on_ranks):
    """Nothing of it stays: the next step is the one of an actor that never met it."""
    for skipped in [found["skipped"] for found in on_ranks]:
        for metrics in skipped["metrics"]:
            assert metrics["actor/skipped_steps"] == metrics["actor/skipped_last"] == 2
        assert skipped["unchanged"]
        assert skipped["changed_later"]
        assert skipped["as_if_nothing"]


def test_a_gradient_that_is_not_finite_is_dropped_and_counted(found):
    """One of the two mini-batches has the poisoned token; the other still counts."""
    metrics, changed_weights = found["poisoned"]
    assert metrics["actor/skipped_steps"] == 1
    assert changed_weights
    assert metrics["actor/grad_norm"] > 0


def test_training_goes_on_afterwards(found):
    metrics, changed_weights = found["plain"]
    assert metrics["actor/skipped_steps"] == 0
    assert len(changed_weights) == 21
    assert all(torch.isfinite(torch.tensor(value)) for value in metrics.values())


def test_a_mini_batch_without_tokens_has_loss_and_gradient_zero(found):
    metrics, changed_weights = found["masked"]
    assert not changed_weights, "moments of the step before would have moved them"
    assert metrics["actor/loss"] == metrics["actor/grad_norm"] == 0.0
    assert metrics["actor/log_ratio_max"] == 0.0
    assert found["critic"]["critic/loss"] == found["critic"]["critic/grad_norm"] == 0.0
