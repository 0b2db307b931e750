"""Reward models trained on pairs: gradient and metrics by the formula; what is saved scores alike.

The reference is transformers' backbone with the worker's first head, one response at a time.
"""

import json

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import logsigmoid
from transformers import AutoModel, AutoModelForSequenceClassification

from hybridrl.data.partition import partition_by_micro_batch
from hybridrl.data.schedule import UpdateSizes, schedule
from hybridrl.distributed.mesh import build_mesh
from hybridrl.trainer.sft import reference_batch
from hybridrl.workers.reward_model import RewardModelWorker, RewardTrainer
from hybridrl.workers.training import Training
from tests.ranks.test_preferences import prompts
from tests.support.launch import run_on_ranks
from tests.support.role_configs import critic_config, fsdp_config, reward_model_config
from tests.support.tiny_hf import tiny_folder
from tests.support.whole_weights import relative_difference


def trained(folder, target):
    """Gradients, metrics of an update, and scores after it, also of the model that is saved."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    spec = fsdp_config(dp_shard=ranks)
    mesh = build_mesh(spec, "cpu")
    worker = RewardTrainer(critic_config(folder, spec), mesh)
    sizes = UpdateSizes(ranks, 8, 1, 24, float, partition_by_micro_batch, whole_episodes=True)
    dealt = schedule(reference_batch(prompts("dpo")), sizes, seed=1, step=1)
    part = dealt.shard(ranks)[rank]
    training = Training(worker.optimizer, worker.pair_loss, spec)
    (mini,) = part.policy_mini_batches()
    training.accumulate_gradients(*mini)
    named = worker.model.named_parameters()
    grads = {name: p.grad.full_tensor() for name, p in named if p.requires_grad}
    worker.optimizer.adamw.zero_grad()
    metrics = worker.update(part, step=1)
    own = worker.compute_scores(part)
    error = worker.save(str(target))
    dist.barrier()
    again = RewardModelWorker(reward_model_config(target, spec), mesh).compute_scores(part)
    parts = [None] * ranks
    dist.all_gather_object(parts, own)
    return len(mini[0]), grads, metrics, own, again, dealt.join(parts), error


def expected(folder):
    backbone = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    head = torch.randn(1, 32, generator=torch.Generator().manual_seed(3)) / 33
    head.requires_grad_()
    batch = reference_batch(prompts("dpo"))
    rows = zip(batch.prompts.rows(), batch.responses.rows(), strict=True)
    states = [backbone(torch.cat(row)[None].long()).last_hidden_state[0, -1] for row in rows]
    scores = (torch.stack(states) @ head.T)[:, 0]
    margins = scores[::2] - scores[1::2]
    loss = -logsigmoid(margins).mean()
    loss.backward()
    grads = {f"backbone.{name}": p.grad for name, p in backbone.named_parameters()}
    return float(loss.detach()), margins.detach(), grads | {"head.weight": head.grad}


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_it_learns_pairs_and_the_saved_classifier_scores_alike(ranks, tmp_path):
    folder, target = tiny_folder("qwen2", tmp_path / "qwen2"), tmp_path / "saved"
    loss, margins, wanted = expected(folder)
    results = run_on_ranks(trained, ranks, folder, target)
    for micros, grads, metrics, own, again, _, error in results:
        assert error is None and micros > 1
        assert relative_difference(grads, wanted) < 1e-5
        assert metrics["actor/loss"] == pytest.approx(loss, rel=1e-5)
        accuracy = float((margins > 0).float().mean())
        assert metrics["actor/preference_accuracy"] == pytest.approx(accuracy)
        assert own.values.equal(again.values)
    config = json.loads((target / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForSequenceClassification"]
    theirs = AutoModelForSequenceClassification.from_pretrained(target, dtype=torch.float32)
    batch, whole = reference_batch(prompts("dpo")), results[0][5]
    for *row, score in zip(batch.prompts.rows(), batch.responses.rows(), whole.rows(), strict=True):
        logits = theirs(torch.cat(row)[None].long()).logits.detach()
        assert logits.shape == (1, 1) and float(score[-1]) == pytest.approx(float(logits), rel=1e-4)
