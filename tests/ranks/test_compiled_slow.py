"""Compiled layers on CPU: the gradients of eager ones, ratio 1, nothing compiled per length."""

import pytest
import torch
import torch.distributed as dist

from hybridrl.config.choices import DType, RouterReplay
from hybridrl.distributed.mesh import build_mesh
from hybridrl.workers.actor import ActorWorker
from hybridrl.workers.reference import ReferenceWorker
from hybridrl.workers.training import Training
from tests.support.launch import run_on_ranks
from tests.support.lora_cases import move_away
from tests.support.role_configs import actor_config, fsdp_config, lora_config, reference_config
from tests.support.tiny_hf import AFTER_DENSE, MORE, OTHER_HEADS, RECURRENT, tiny_folder
from tests.support.training_batches import (
    batch_with_experts,
    my_part,
    training_batch,
    with_old_log_probs,
)

# Experts can be compiled in bfloat16 only.
MIXTURES = ("qwen3_moe", "qwen2_moe", "olmoe", "mixtral", "gpt_oss", *AFTER_DENSE)
DENSE = sorted(
    MORE.keys() - OTHER_HEADS - {"gemma4", "gemma4_moe"} - (RECURRENT - {"lfm2"}) - set(MIXTURES)
)
# Every response alone, some together, all together: packed lengths from 6 to 77.
BUDGETS = (15, 30, 200)


def compiled_and_eager(folder, lora_rank):
    """For each kind of layer: gradients by budget, metrics of an update, graphs compiled."""
    found = {}
    for compile_layers in (False, True):
        spec = fsdp_config(
            dp_shard=dist.get_world_size(),
            compile=compile_layers,
            activation_checkpointing=compile_layers,
        )
        actor = ActorWorker(
            actor_config(folder, spec, lora=lora_config(lora_rank)), build_mesh(spec, "cpu")
        )
        if lora_rank:
            move_away(actor)
        grads = []
        for max_tokens in BUDGETS:
            training = Training(actor.optimizer, actor.policy_loss, spec)
            (mini,) = my_part(training_batch(), 8, max_tokens).mini_batches()
            training.accumulate_gradients(*mini)
            full = [p.grad.full_tensor().flatten() for p in actor.optimizer.parameters]
            grads.append(torch.cat(full))
            actor.optimizer.adamw.zero_grad()
        batch = with_old_log_probs(training_batch(), actor)
        metrics = actor.update(my_part(batch), 1, 0.1)
        found[compile_layers] = (grads, metrics, reference_log_probs(actor, lora_rank))
    return found, torch._dynamo.utils.counters["stats"]["unique_graphs"]


def reference_log_probs(actor, lora_rank):
    """Of the actor's model without adapters, if it has any: the same layers, compiled again."""
    if not lora_rank:
        return torch.zeros(0)
    config = reference_config(actor.config.model.path, actor.config.fsdp, lora=actor.config.lora)
    reference = ReferenceWorker(config, actor.mesh)
    reference.connect({"actor": actor, "ref": reference})
    return reference.compute_log_probs(my_part(training_batch())).values


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lora_rank"),
    [("qwen2", 0), ("qwen2", 4), *((name, 0) for name in DENSE)],
)
def test_compiled_layers_train_like_eager_ones_and_ratio_is_one(tmp_path, name, lora_rank):
    folder = tiny_folder(name, tmp_path / name)
    results = run_on_ranks(compiled_and_eager, 2, folder, lora_rank, time_limit_s=280)
    for found, num_graphs in results:
        (eager, _, eager_ref), (compiled, metrics, compiled_ref) = found[False], found[True]
        torch.testing.assert_close(compiled_ref, eager_ref, rtol=1e-5, atol=1e-5)
        for one, other in zip(compiled, eager, strict=True):
            assert float((one - other).norm() / other.norm()) < 1e-5
        assert metrics["actor/first_log_ratio_max"] == 0.0
        assert metrics["actor/log_ratio_max"] > 1e-4
        # One sequence or several; gradients of an earlier micro-batch there or not; adapters off;
        # layers of two kinds.
        assert 1 <= num_graphs <= (8 if lora_rank or name in MORE else 4)


def experts_in_bfloat16(folder, replay):
    """Metrics of an update with eager and with compiled, recomputed layers; graphs compiled."""
    found = []
    for compile_layers in (False, True):
        spec = fsdp_config(
            dp_shard=dist.get_world_size(),
            compile=compile_layers,
            activation_checkpointing=compile_layers,
            param_dtype=DType.bfloat16,
        )
        config = actor_config(folder, spec, router_replay=replay, router_balance_coef=0.1)
        actor = ActorWorker(config, build_mesh(spec, "cpu"))
        batch = training_batch() if replay is RouterReplay.none else batch_with_experts()
        found.append(actor.update(my_part(with_old_log_probs(batch, actor)), 1, 0.1))
    return found, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "replay"),
    [*((name, RouterReplay.none) for name in MIXTURES), ("qwen3_moe", RouterReplay.replay)],
)
def test_compiled_experts_train_in_bfloat16_and_ratio_is_one(tmp_path, name, replay):
    folder = tiny_folder(name, tmp_path / name)
    for (eager, compiled), num_graphs in run_on_ranks(experts_in_bfloat16, 2, folder, replay):
        two_kinds = name in (*AFTER_DENSE, "gpt_oss")
        assert num_graphs == 1 + two_kinds
        assert compiled["actor/first_log_ratio_max"] == 0.0
        assert compiled["actor/grad_norm"] == pytest.approx(eager["actor/grad_norm"], rel=0.03)
        for metric in ("actor/loss", "router/balance_loss", "router/entropy"):
            assert compiled[metric] == pytest.approx(eager[metric], rel=0.03), metric
