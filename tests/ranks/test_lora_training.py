"""LoRA: gradients and merged weights are peft's own, the base stays, and step 0 is the base."""

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from hybridrl.config.choices import Accumulation
from hybridrl.distributed.fsdp import load_sharded_policy
from hybridrl.distributed.lora import checkpoint_parameters
from hybridrl.distributed.mesh import build_mesh
from hybridrl.distributed.storage.policy_weights import adapter_state_dict
from hybridrl.workers.actor import ActorWorker
from hybridrl.workers.reference import ReferenceWorker
from hybridrl.workers.training import Training
from tests.support.launch import run_on_ranks
from tests.support.lora_cases import move_away
from tests.support.role_configs import (
    actor_config,
    fsdp_config,
    lora_config,
    model_config,
    reference_config,
)
from tests.support.tiny_hf import tiny_folder
from tests.support.training_batches import scheduled, training_batch
from tests.support.whole_weights import full_state_dict, relative_difference

CLIP, ENTROPY_COEF, TEMPERATURE = 0.2, 0.01, 0.8
RANK, ALPHA = 4, 8.0
TARGETS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
COLUMNS = [f"model.layers.{i}.{n}.weight" for i in (0, 1) for n in ("self_attn.o_proj",)]
COLUMNS += [f"model.layers.{i}.mlp.down_proj.weight" for i in (0, 1)]


def lora():
    return lora_config(RANK, alpha=ALPHA, target_modules=TARGETS)


def dealt(batch, spec, mini_batch_size, max_tokens=30):
    shards = dist.get_world_size() // spec.ulysses_size
    whole = scheduled(
        batch, num_ranks=shards, mini_batch_size=mini_batch_size, max_tokens=max_tokens
    )
    return whole, whole.shard(shards)[dist.get_rank() // spec.ulysses_size]


def gradients(actor, spec):
    (mini,) = dealt(training_batch(), spec, 8)[1].mini_batches()
    training = Training(actor.optimizer, actor.policy_loss, spec)
    training.accumulate_gradients(*mini)
    found = {
        name: param.grad.full_tensor()
        for name, param in actor.model.lm.named_parameters()
        if param.grad is not None
    }
    actor.optimizer.adamw.zero_grad()
    return found


def old_log_probs(actor, batch, spec):
    whole, mine = dealt(batch, spec, 4)
    results = [None] * dist.get_world_size()
    dist.all_gather_object(results, actor.compute_log_probs(mine))
    return whole.join(results[:: spec.ulysses_size])


def base_bits(actor):
    return {
        name: param.detach().full_tensor().clone()
        for name, param in checkpoint_parameters(actor.model.lm)
    }


def train(folder, changes):
    spec = fsdp_config(**changes)
    mesh = build_mesh(spec, "cpu")
    actor = ActorWorker(actor_config(folder, spec, lora=lora()), mesh)
    plain = load_sharded_policy(model_config(folder), spec, mesh, 7)
    seen = {"first_adapters": adapter_state_dict(actor.model)}
    seen["trained"] = sum(p.numel() for p in actor.optimizer.parameters)
    batch = training_batch()
    seen["at_first"] = old_log_probs(actor, batch, spec).values
    adapted, actor.model = actor.model, plain
    seen["of_the_base"] = old_log_probs(actor, batch, spec).values
    actor.model = adapted
    seen["base"] = base_bits(actor)
    move_away(actor)
    seen["gradients"] = gradients(actor, spec)
    seen["moved"] = adapter_state_dict(actor.model), full_state_dict(actor.model)
    batch = batch.adding(old_log_probs=old_log_probs(actor, batch, spec))
    seen["metrics"] = actor.update(dealt(batch, spec, 4)[1], 1, kl_coef=0.0)
    seen["base_later"] = base_bits(actor)
    seen["states"] = len(actor.optimizer.adamw.state)
    seen["later"] = adapter_state_dict(actor.model)
    reference = ReferenceWorker(reference_config(folder, spec, lora=lora()), mesh)
    for role in (actor, reference):
        role.connect({"actor": actor, "ref": reference})
    seen["reference"] = old_log_probs(reference, batch, spec).values
    seen["after_reference"] = old_log_probs(actor, batch, spec).values
    return seen


def peft_model(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS)
    return get_peft_model(model, config).eval()


def take_adapters(model, weights):
    for name, param in model.named_parameters():
        if "lora_" in name:
            param.data.copy_(weights[name.replace(".default", "")])


def expected_gradients(folder, weights):
    """PPO's clipped objective and the entropy bonus, one response at a time, through peft."""
    model = peft_model(folder)
    take_adapters(model, weights)
    batch = training_batch()
    fields = (batch.prompts, batch.responses, batch.response_mask, batch.old_log_probs)
    total = 0.0
    for prompt, response, mask, old, advantage in zip(
        *(field.rows() for field in (*fields, batch.advantages)), strict=True
    ):
        logits = model(input_ids=torch.cat([prompt, response])[None]).logits[0]
        log_p = (logits[len(prompt) - 1 : -1] / TEMPERATURE).log_softmax(-1)
        ratio = (log_p.gather(-1, response[:, None])[:, 0] - old).exp()
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        entropy = -(log_p.exp() * log_p).sum(-1)
        total = total + (-surrogate - ENTROPY_COEF * entropy)[mask].sum()
    (total / batch.response_mask.values.sum()).backward()
    return {
        name.removeprefix("base_model.model.").replace(".default", ""): param.grad
        for name, param in model.named_parameters()
        if param.grad is not None
    }


CASES = {
    "one rank": (1, {"dp_shard": 1}),
    "columns": (2, {"dp_shard": 2, "columns": COLUMNS, "tensor_parallel_size": 2}),
    "replicas": (2, {"dp_shard": 1, "dp_replicate": 2, "accumulation": Accumulation.sharded}),
    "ulysses": (2, {"dp_shard": 2, "ulysses_size": 2, "activation_checkpointing": True}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tied embeddings and biases: the model with the most to get wrong."""
    return tiny_folder("qwen2", tmp_path_factory.mktemp("lora") / "qwen2")


SLOW = [pytest.param("replicas", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=["one rank", "columns", "ulysses", *SLOW])
def ranks(request, folder):
    number, changes = CASES[request.param]
    return run_on_ranks(train, number, folder, changes)


def test_the_adapted_model_is_the_base_at_first(ranks):
    for seen in ranks:
        assert torch.equal(seen["at_first"], seen["of_the_base"])


def test_first_adapters_are_the_same_however_they_are_cut(ranks, first_adapters):
    for name, weight in ranks[0]["first_adapters"].items():
        assert torch.equal(weight, first_adapters[name])
        bound = weight.shape[1] ** -0.5
        if "lora_A" in name:
            assert 0.8 * bound < weight.abs().max() <= bound
        else:
            assert not weight.any()
    drawn = [w for name, w in first_adapters.items() if "q_proj.lora_A" in name]
    assert not torch.equal(*drawn), "each layer has its own"


@pytest.fixture(scope="module")
def first_adapters(folder):
    return run_on_ranks(train, 1, folder, {"dp_shard": 1})[0]["first_adapters"]


def test_gradients_are_those_of_peft(ranks, folder):
    expected = expected_gradients(folder, ranks[0]["moved"][0])
    for seen in ranks:
        assert relative_difference(seen["gradients"], expected) < 1e-5


def test_only_adapters_are_trained_and_have_moments(ranks, folder):
    """On one rank: r (in + out) of q, v, o, up and down, twice."""
    sizes = [(32, 32), (16, 32), (32, 32), (48, 32), (32, 48)]
    whole = 2 * sum(RANK * (o + i) for o, i in sizes)
    for seen in ranks:
        assert seen["states"] == 2 * 2 * len(TARGETS)
        assert seen["trained"] == whole
    later, before = ranks[0]["later"], ranks[0]["moved"][0]
    assert all(not torch.equal(later[name], before[name]) for name in before)


def test_the_base_keeps_its_bits(ranks, folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for seen in ranks:
        for name, param in model.named_parameters():
            assert torch.equal(seen["base"][name], param)
            assert torch.equal(seen["base_later"][name], param)


def test_the_first_ratio_is_one_and_later_ones_are_not(ranks):
    for seen in ranks:
        assert seen["metrics"]["actor/first_log_ratio_max"] == 0.0
        assert seen["metrics"]["actor/log_ratio_max"] > 1e-6
        assert seen["metrics"]["actor/skipped_steps"] == 0


def test_the_reference_is_the_trained_model_without_adapters(ranks):
    """Also after an update, and its forward leaves the adapters on."""
    for seen in ranks:
        assert torch.equal(seen["reference"], seen["of_the_base"])
        assert (seen["after_reference"] - seen["reference"]).abs().max() > 1e-3


def test_merged_weights_are_what_peft_merges(ranks, folder):
    """W + alpha / r * B A; products of other shapes may round otherwise."""
    adapters, merged = ranks[0]["moved"]
    model = peft_model(folder)
    take_adapters(model, adapters)
    for name, param in model.merge_and_unload().named_parameters():
        torch.testing.assert_close(merged[name], param, rtol=1e-6, atol=1e-7)
