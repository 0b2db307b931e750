"""Losses of pairs and labelled responses: loss, gradient and metrics on packed, sharded rows.

The reference is transformers' own model in one process, one response at a time, with the formulas
of TRL's trainers written out.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from hybridrl.config.choices import Aggregation
from hybridrl.config.sections import FunctionConfig
from hybridrl.data.partition import partition_by_micro_batch
from hybridrl.data.schedule import UpdateSizes, schedule
from hybridrl.data.sources.prompts import Prompt
from hybridrl.distributed.mesh import build_mesh
from hybridrl.trainer.sft import reference_batch
from hybridrl.workers.actor import ActorWorker
from hybridrl.workers.training import Training
from tests.support.launch import run_on_ranks
from tests.support.role_configs import actor_config, algorithm_config, fsdp_config
from tests.support.tiny_hf import tiny_folder
from tests.support.whole_weights import relative_difference

LENGTHS = [(3, 4, 2), (5, 9, 7), (2, 1, 3), (7, 6, 5), (4, 12, 6), (1, 5, 5), (6, 2, 8), (3, 8, 1)]
BETA, KL = 0.4, 0.3
ARGS = {
    "dpo": {"beta": BETA, "label_smoothing": 0.1},
    "ipo": {"beta": BETA},
    "kto": {"beta": BETA, "desirable_weight": 1.5, "undesirable_weight": 0.5},
}


def prompts(name):
    """Pairs of a 67-token vocabulary; for KTO their better and worse responses in turn."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 67, (sum(n),), generator=generator).tolist() for n in LENGTHS]
    made = []
    for index, (row, (asked, better, _)) in enumerate(zip(rows, LENGTHS, strict=True)):
        own, answers = row[:asked], (row[asked : asked + better], row[asked + better :])
        if name == "kto":
            fields = {"answer_ids": answers[index % 2], "is_desired": index % 2 == 0}
        else:
            fields = {"answer_ids": answers[0], "rejected_ids": answers[1]}
        made.append(Prompt(index, own, "", "", {}, {}, **fields))
    return made


def batch_of(name):
    batch = reference_batch(prompts(name))
    generator = torch.Generator().manual_seed(1)
    ref = -4.2 + 0.3 * torch.randn(len(batch.responses.values), generator=generator)
    fields = {"ref_log_probs": batch.responses.like(ref)}
    if name == "kto":
        fields["kl_baseline"] = batch.responses.like(torch.full_like(ref, KL))
    return batch.adding(**fields)


def gradients(folder, name, max_tokens):
    """Micro-batches, loss, metrics and full gradients of all pairs as one mini-batch."""
    ranks = dist.get_world_size()
    spec = fsdp_config(dp_shard=ranks)
    algorithm = replace(
        algorithm_config(),
        advantage="none",
        loss=FunctionConfig(function=name, args=ARGS[name]),
        aggregation=Aggregation.sequence_mean,
    )
    config = actor_config(folder, spec, algorithm=algorithm, temperature=1.0, entropy_coef=0.0)
    actor = ActorWorker(config, build_mesh(spec, "cpu"))
    sizes = UpdateSizes(ranks, 8, 1, max_tokens, float, partition_by_micro_batch, name != "kto")
    part = schedule(batch_of(name), sizes, seed=1, step=1).shard(ranks)[dist.get_rank()]
    (mini,) = part.policy_mini_batches()
    training = Training(actor.optimizer, actor.policy_loss, spec)
    training.accumulate_gradients(*mini)
    full = {name: p.grad.full_tensor() for name, p in actor.model.named_parameters()}
    actor.optimizer.adamw.zero_grad()
    return len(mini[0]), full, actor.update(part, step=1, kl_coef=0.0)


def expected(folder, name):
    """Loss, its gradients, and implicit rewards of preferred and other responses."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    batch = batch_of(name)
    ratios = []
    for prompt, answer, ref in zip(
        *(ragged.rows() for ragged in (batch.prompts, batch.responses, batch.ref_log_probs)),
        strict=True,
    ):
        logits = model(torch.cat([prompt, answer])[None].long()).logits[0, len(prompt) - 1 : -1]
        own = logits.log_softmax(-1).gather(1, answer[:, None].long())[:, 0]
        ratios.append((own - ref).sum())
    lengths = batch.responses.lengths
    if name == "kto":
        losses = [
            1.5 * (1 - torch.sigmoid(BETA * (ratio - KL)))
            if index % 2 == 0
            else 0.5 * (1 - torch.sigmoid(BETA * (KL - ratio)))
            for index, ratio in enumerate(ratios)
        ]
    else:
        scale = lengths if name == "ipo" else torch.ones_like(lengths)
        own = [ratio / n for ratio, n in zip(ratios, scale.tolist(), strict=True)]
        margins = [a - b for a, b in zip(own[::2], own[1::2], strict=True)]
        losses = [
            (margin - 1 / (2 * BETA)) ** 2
            if name == "ipo"
            else -0.9 * logsigmoid(BETA * margin) - 0.1 * logsigmoid(-BETA * margin)
            for margin in margins
        ]
    loss = torch.stack(losses).mean()
    loss.backward()
    rewards = BETA * torch.stack(ratios).detach()
    grads = {f"lm.{name}": p.grad for name, p in model.named_parameters()}
    return float(loss.detach()), grads, rewards[::2].mean(), rewards[1::2].mean()


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ARGS)
def test_loss_gradient_and_metrics_are_those_of_the_formulas(name, ranks, tmp_path):
    folder = tiny_folder("qwen2", tmp_path / "qwen2")
    loss, grads, chosen, rejected = expected(folder, name)
    results = run_on_ranks(gradients, ranks, folder, name, 24)
    results += run_on_ranks(gradients, ranks, folder, name, 400)
    assert results[0][0] > results[-1][0] == 1, "several micro-batches, and one"
    for _, full, metrics in results:
        assert relative_difference(full, grads) < 1e-5
        assert metrics["actor/loss"] == pytest.approx(loss, rel=1e-5)
        assert metrics["actor/reward_chosen"] == pytest.approx(float(chosen), rel=1e-4)
        assert metrics["actor/reward_rejected"] == pytest.approx(float(rejected), rel=1e-4)
        assert ("actor/preference_accuracy" in metrics) == (name != "kto")
