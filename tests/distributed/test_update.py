"""Updates at the edges: gradients that are not finite, mini-batches without a token, clipping."""

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
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tiny_folder("llama", tmp_path_factory.mktemp("update") / "llama")
    return run_on_ranks(odd_updates, 2, folder)[0]


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
