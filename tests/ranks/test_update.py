"""Updates at the edges: losses that are not finite, mini-batches without a token, clipping."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hybridrl.data.schedule import ScheduledBatch
from hybridrl.distributed.mesh import build_mesh
from hybridrl.replay.session import examine
from hybridrl.replay.worker import ReplayConfig, ReplayWorker
from hybridrl.trainer.nonfinite import ReplayBatch
from hybridrl.workers.actor import ActorWorker
from hybridrl.workers.critic import CriticWorker
from hybridrl.workers.saver import SaverWorker
from tests.support.launch import run_on_ranks
from tests.support.role_configs import actor_config, critic_config, fsdp_config, saver_config
from tests.support.run_configs import run_config
from tests.support.tiny_hf import tiny_folder
from tests.support.training_batches import RESPONSES, my_part, scheduled, training_batch
from tests.support.whole_weights import full_state_dict


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
    no_advantage = training_batch().adding(advantages=training_batch().responses.like(poisoned))
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


class HereAndThere:
    """A group of replay workers: each rank calls its own, and gets the results of all."""

    def __init__(self, trained, role="actor"):
        config = ReplayConfig(role=role, fsdp=trained.config.fsdp)
        self.worker = ReplayWorker(config, trained.mesh)
        self.worker.connect({role: trained})
        self.num_shards = dist.get_world_size()

    def call(self, method, *args):
        rank = dist.get_rank()
        whole = args[0] if args and isinstance(args[0], ScheduledBatch) else None
        if whole is not None:
            args = (whole.shard(self.num_shards)[rank], *args[1:])
        results = [None] * self.num_shards
        dist.all_gather_object(results, getattr(self.worker, method)(*args))
        return results if whole is None else whole.join(results)


def replays(folder, mesh, spec, disk):
    """What replays find: an advantage that is NaN, a loss that is, weights, and nothing."""
    batch, actor = training_batch(), ActorWorker(actor_config(folder, spec), mesh)
    group, config = HereAndThere(actor), run_config()
    dealt = scheduled(batch, num_ranks=2, mini_batch_size=4, max_tokens=30)

    def findings(batch, worker=group):
        return examine(ReplayBatch("actor", 3, 0.1, batch, dealt.ranks, config), worker)

    before, found = state_of(actor), {"nothing": findings(batch)}
    advantages = batch.advantages.values.clone()
    advantages[sum(RESPONSES[:5]) + 1] = float("nan")
    poisoned = batch.adding(advantages=batch.responses.like(advantages))
    found["advantage"] = findings(poisoned)
    found["loss"] = findings(batch, HereAndThere(NaNForShortest(actor.config, mesh)))
    found["unchanged"] = same(before, state_of(actor))
    critic = CriticWorker(critic_config(folder, spec), mesh)
    returns = batch.returns.values.clone()
    returns[0] = float("inf")
    overflowing = batch.adding(returns=batch.responses.like(returns))
    of_critic = ReplayBatch("critic", 3, 0.0, overflowing, dealt.ranks, config)
    found["critic"] = examine(of_critic, HereAndThere(critic, "critic"))
    saver = SaverWorker(saver_config(), mesh)
    saver.connect({"actor": actor, "saver": saver})
    save(saver, f"{disk}/good")
    with torch.no_grad():
        if dist.get_rank() == 0:
            actor.optimizer.parameters[0].to_local()[0, 0] = float("inf")
    save(saver, f"{disk}/bad")
    group.call("load_weights", f"{disk}/good")
    found["restored"] = same(before, state_of(actor))
    group.call("load_weights", f"{disk}/bad")
    found["weights"] = findings(batch)
    return found


def save(saver, folder):
    Path(folder).mkdir(exist_ok=True)
    saver.begin_save(folder)
    assert saver.finish_save().error is None


class NaNForShortest(ActorWorker):
    """The loss of the response with a single token is NaN."""

    def policy_loss(self, micro, totals):
        loss, stats = super().policy_loss(micro, totals)
        return loss * (float("nan") if 1 in micro.responses.lengths else 1.0), stats


def odd_updates(folder, disk):
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
        "poisoned": batch.adding(advantages=mask.like(poisoned)),
        "masked": batch.adding(response_mask=mask.like(torch.zeros_like(mask.values))),
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
    found["replays"] = replays(folder, mesh, spec, disk)
    return found


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory):
    folder = tiny_folder("llama", tmp_path_factory.mktemp("update") / "llama")
    return run_on_ranks(odd_updates, 2, folder, tmp_path_factory.mktemp("weights"))


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
    assert math.isnan(metrics["actor/entropy"]), "0 would be a collapse"
    assert found["critic"]["critic/loss"] == found["critic"]["critic/grad_norm"] == 0.0


def test_a_replay_names_the_response_and_its_field(found):
    replayed = found["replays"]["advantage"]
    (response,) = replayed.responses
    assert response.response == 5
    assert response.bad == ["advantages", "loss", "gradient"]
    (micro,) = [micro for micro in replayed.micro_batches if not math.isfinite(micro.loss)]
    assert 5 in micro.responses
    assert not replayed.weights


def test_a_replay_finds_the_response_on_which_the_loss_alone_fails(found):
    (response,) = found["replays"]["loss"].responses
    assert (response.response, RESPONSES[response.response]) == (2, 1)
    assert response.bad == ["loss", "gradient"]


def test_a_replay_of_the_critic_looks_at_its_loss(found):
    (response,) = found["replays"]["critic"].responses
    assert (response.response, response.bad) == (0, ["returns", "loss", "gradient"])


def test_a_replay_names_weights_that_are_not_finite(found):
    ((name, count),) = found["replays"]["weights"].weights.items()
    assert (name, count) == ("lm.model.embed_tokens.weight", 1)


def test_a_replay_of_a_good_update_finds_nothing_and_changes_nothing(found):
    assert found["replays"]["nothing"].is_finite
    assert found["replays"]["unchanged"]
    assert found["replays"]["restored"]
