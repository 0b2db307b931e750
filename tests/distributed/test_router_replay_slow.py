"""What replay gains where vLLM and the trainer round: bfloat16 on both sides, one rank."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from hybridrl.config.choices import DType, RouterReplay
from hybridrl.distributed.mesh import build_mesh
from hybridrl.workers.actor import ActorWorker
from hybridrl.workers.rollout import RolloutWorker
from tests.distributed.launch import run_on_ranks
from tests.reshard_cases import SIZES, Case, prompts, rollout_config, set_rank_environment
from tests.role_configs import actor_config, fsdp_config
from tests.training_batches import scheduled

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
    batch = worker.generate(replace(prompts(temperature=0.8), responses_per_prompt=8))
    seen = {}
    for mode, actor in actors.items():
        sizes = {"num_ranks": 1, "mini_batch_size": len(batch), "max_tokens": 600}
        dealt = scheduled(batch, **sizes)
        old = dealt.join([actor.compute_log_probs(dealt.shard(1)[0])])
        made_up = replace(batch, old_log_probs=old, advantages=old, ref_log_probs=old)
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
