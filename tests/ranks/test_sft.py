"""An update on reference answers is transformers' cross entropy over the answers' tokens.

The reference is transformers' own loss with the prompts' labels masked, one row at a time; the
actor's rows are packed, over two ranks and several micro-batches.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from hybridrl.config.sections import FunctionConfig
from hybridrl.data.sources.prompts import Prompt
from hybridrl.distributed.mesh import build_mesh
from hybridrl.trainer.sft import reference_batch
from hybridrl.workers.actor import ActorWorker
from tests.support.launch import run_on_ranks
from tests.support.role_configs import actor_config, algorithm_config, fsdp_config
from tests.support.tiny_hf import tiny_folder
from tests.support.training_batches import scheduled

LENGTHS = [(3, 4), (5, 9), (2, 1), (7, 6), (4, 12), (1, 5), (6, 2), (3, 8)]


def answered() -> list[Prompt]:
    """Prompts with reference answers, of a 67-token vocabulary."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 67, (p + a,), generator=generator).tolist() for p, a in LENGTHS]
    return [
        Prompt(index, row[:length], "", "", {}, {}, answer_ids=row[length:])
        for index, (row, (length, _)) in enumerate(zip(rows, LENGTHS, strict=True))
    ]


def updated(folder):
    """Metrics of a step on this rank's rows, and log-probs of all answers before it."""
    spec = fsdp_config(dp_shard=2)
    algorithm = replace(
        algorithm_config(), advantage="none", loss=FunctionConfig(function="nll", args={})
    )
    config = actor_config(folder, spec, algorithm=algorithm, temperature=1.0, entropy_coef=0.0)
    actor = ActorWorker(config, build_mesh(spec, "cpu"))
    dealt = scheduled(reference_batch(answered()), num_ranks=2, mini_batch_size=8, max_tokens=24)
    part = dealt.shard(2)[dist.get_rank()]
    assert len(part.epochs[0][0]) > 1, "several micro-batches"
    assert max(len(micro) for micro in part.epochs[0][0]) > 1, "packed rows"
    log_probs = actor.compute_log_probs(part)
    return log_probs, actor.update(part, step=1, kl_coef=0.0)


def test_loss_and_gradient_are_those_of_masked_cross_entropy(tmp_path):
    folder = tiny_folder("qwen2", tmp_path / "qwen2")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    total, tokens = 0.0, sum(answer for _, answer in LENGTHS)
    for prompt in answered():
        ids = torch.tensor([[*prompt.token_ids, *prompt.answer_ids]])
        labels = ids.clone()
        labels[0, : len(prompt.token_ids)] = -100
        total = total + model(input_ids=ids, labels=labels).loss * len(prompt.answer_ids)
    loss = total / tokens
    loss.backward()
    loss = float(loss.detach())
    norm = torch.stack([param.grad.norm() for param in model.parameters()]).norm()
    results = run_on_ranks(updated, 2, folder)
    for _, metrics in results:
        assert metrics["actor/loss"] == pytest.approx(loss, rel=1e-5)
        assert metrics["actor/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        assert "actor/log_ratio_max" not in metrics
    found = torch.cat([log_probs.values for log_probs, _ in results])
    assert -float(found.mean()) == pytest.approx(loss, rel=1e-5)
