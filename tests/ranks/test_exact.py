"""rollout.exact in the trainer: unequal log-probs are noticed, and the first one is named."""

import torch

from hybridrl.data.ragged import Ragged
from hybridrl.distributed.mesh import build_mesh
from hybridrl.workers.actor import ActorWorker
from tests.support.launch import run_on_ranks
from tests.support.role_configs import actor_config, fsdp_config
from tests.support.tiny_hf import tiny_folder
from tests.support.training_batches import my_part, scheduled, training_batch


def updates(folder):
    """Metric and description after updates with equal log-probs, old tokens, a changed token."""
    spec = fsdp_config(dp_shard=1)
    actor = ActorWorker(actor_config(folder, spec), build_mesh(spec, "cpu"))
    outcomes = []
    for changed, is_current in ((0.0, True), (0.1, False), (0.1, True)):
        batch = training_batch()
        dealt = scheduled(batch, num_ranks=1, mini_batch_size=8, max_tokens=1000)
        (own,) = dealt.shard(1)
        old = dealt.join([actor.compute_log_probs(own)]).values
        old[-1] += changed  # of the last response
        current = Ragged(batch.response_mask.values.clone(), batch.responses.lengths)
        current.values[-1] &= is_current
        batch = batch.adding(
            old_log_probs=batch.responses.like(old), current=current, engine=torch.arange(8)
        )
        metrics = actor.update(my_part(batch, 8, 1000), 1, kl_coef=0.1)
        outcomes.append((metrics["actor/first_log_ratio_max"], actor.first_difference()))
    return outcomes


def test_the_first_unequal_token_is_named(tmp_path):
    folder = tiny_folder("qwen3", tmp_path)
    ((equal, older, unequal),) = run_on_ranks(updates, 1, folder)
    assert equal == older == (0.0, None)
    largest, text = unequal
    assert abs(largest - 0.1) < 1e-6
    assert "token 7 of 8 after a prompt of 3, from engine 7," in text
