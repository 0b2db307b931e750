"""Router replay on one rank: what it gains in bfloat16, and preempted requests."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from hybridrl.config.choices import DType, RouterReplay
from hybridrl.distributed.mesh import build_mesh
from hybridrl.workers.actor import ActorWorker
from hybridrl.workers.rollout import RolloutWorker
from tests.support.launch import run_on_ranks
from tests.support.reshard_cases import (
    SIZES,
    Actor,
    Case,
    build_worker,
    differing_experts,
    prompts,
    rollout_config,
    set_rank_environment,
    write_folders,
)
from tests.support.role_configs import actor_config, fsdp_config
from tests.support.training_batches import scheduled

# Many layers, and many experts for a router to be undecided between.
MODEL = SIZES | {"num_hidden_layers": 16, "num_key_value_heads": 2, "head_dim": 64}
EXPERTS = {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 96}
MODES = (RouterReplay.record, RouterReplay.replay)


def recorded_and_replayed(folder):
    """By mode: differences of log-probs from vLLM's, and metrics of an update."""
    set_rank_environment()
    spec = fsdp_config(1, param_dtype=DType.bfloat16)
    mesh = build_mesh(spec, "cpu")
    case = Case("qwen3_moe", DType.bfloat16, tp=1)
    changes = {"responses_per_prompt": 8, "kv_cache_mb": 64}
    worker = RolloutWorker(rollout_config(case, folder, router_replay=MODES[0], **changes), mesh)
    actors = {m: ActorWorker(actor_config(folder, spec, router_replay=m), mesh) for m in MODES}
    worker.connect({"actor": actors[MODES[0]]})
    worker.reshard(1)
    batch = worker.generate(prompts(temperature=0.8, each=8))
    seen = {}
    for mode, actor in actors.items():
        sizes = {"num_ranks": 1, "mini_batch_size": len(batch), "max_tokens": 600}
        dealt = scheduled(batch, **sizes)
        old = dealt.join([actor.compute_log_probs(dealt.shard(1)[0])])
        made_up = batch.adding(old_log_probs=old, advantages=old, ref_log_probs=old)
        metrics = actor.update(scheduled(made_up, **sizes).shard(1)[0], 1, 0.0)
        seen[mode] = (old.values - batch.rollout_log_probs.values).abs(), metrics
    return seen


@pytest.mark.slow
def test_replay_brings_log_probs_closer_to_those_of_vllm(tmp_path):
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**MODEL, **EXPERTS, norm_topk_prob=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.03)
    model.save_pretrained(tmp_path)
    (seen,) = run_on_ranks(recorded_and_replayed, 1, tmp_path)
    for _, metrics in seen.values():
        assert metrics["actor/first_log_ratio_max"] == 0.0
        assert 0.02 < metrics["router/differing_choices"] < 0.2
        assert metrics["router/differing_tokens"] > 0.3
    record, replayed = (seen[mode] for mode in MODES)
    assert replayed[0].mean() < 0.8 * record[0].mean()


def preempted(folder):
    """Preemptions in a cache of three blocks of 128 tokens, and experts other than transformers'.

    Six prompts fill a block each, and their responses need a second one.
    """
    set_rank_environment()
    case = Case("qwen3_moe", DType.float32, tp=1)
    worker = build_worker(case, folder, "cpu", kv_cache_mb=1)
    actor = Actor(folder / "A", replace(case.spec(), columns=[]), worker.mesh)
    worker.connect({"actor": actor})
    actor.take_weights(folder / "A")
    worker.reshard(1)
    rows = [[(7 * i + 3 * j) % 90 + 5 for j in range(121 + i)] for i in range(6)]
    scheduler = worker.engine._llm.llm_engine.engine_core.engine_core.scheduler
    preempt = scheduler._preempt_request
    with patch.object(scheduler, "_preempt_request", side_effect=preempt) as count:
        batch = worker.generate(prompts(rows=rows, each=1))
    return count.call_count, differing_experts(batch, folder / "A")


@pytest.mark.slow
def test_experts_of_preempted_requests_are_those_of_the_last_forward(tmp_path):
    write_folders(tmp_path, ["qwen3_moe"])
    ((count, (differing, total)),) = run_on_ranks(preempted, 1, tmp_path / "qwen3_moe")
    assert count > 0
    assert differing == 0 and total > 2 * 6 * 121
