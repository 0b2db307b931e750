"""The memory prediction against what the real forwards and backwards allocate, on fake tensors.

The code is the one that runs on a GPU, attention kernel included, whose fake implementation says
what it returns and keeps. The kernels of the softmax have none: they allocate nothing but their
results. Weights and their gradients are left out; FSDP2 moves them.
"""

import copy
import json

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from hybridrl.config.choices import Accumulation, DType
from hybridrl.config.planner.model_shape import model_shape
from hybridrl.config.planner.training_memory import TrainingMemory, Workload, kept_by_layer
from hybridrl.distributed.experts import replace_experts
from hybridrl.distributed.forward import attention, log_probs
from hybridrl.distributed.forward.layers import hand_on_bounds
from hybridrl.distributed.forward.log_probs import Entropy, Rows
from hybridrl.distributed.forward.packing import Packed
from hybridrl.distributed.forward.routing import has_experts, keep_routing
from hybridrl.distributed.forward.token_models import ScalarModel, TokenLogProbs
from hybridrl.distributed.fsdp import _set_forward
from tests.support.allocations import Allocations
from tests.support.role_configs import fsdp_config
from tests.support.tiny_hf import AFTER_DENSE, MORE, RECURRENT, packed_recurrences

TOKENS, CHUNK, LAYERS = 4096, 1024, 3
# Key heads as many as query heads: torch 2.11's kernel wants them repeated, later ones do not.
QWEN = Qwen2Config(
    vocab_size=151_936,
    hidden_size=1536,
    intermediate_size=8960,
    num_hidden_layers=LAYERS,
    num_attention_heads=12,
    num_key_value_heads=12,
    tie_word_embeddings=True,
)
# Its norms weigh more than its MLP.
WIDE = LlamaConfig(
    vocab_size=32_000,
    hidden_size=2048,
    intermediate_size=2048,
    num_hidden_layers=LAYERS,
    num_attention_heads=16,
    num_key_value_heads=16,
    tie_word_embeddings=True,
)
HEAD_NORMS = Qwen3Config(
    vocab_size=1000,
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=LAYERS,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=128,
    tie_word_embeddings=True,
)


@pytest.fixture(autouse=True)
def gpu_code(monkeypatch):
    """Take the branches that a GPU takes."""
    attention.register_packed_attention()
    monkeypatch.setattr(attention, "has_kernel", lambda *of: True)
    new = lambda logits: torch.empty(len(logits), dtype=torch.float32)  # noqa: E731
    monkeypatch.setattr(log_probs, "softmax_rows", lambda x, *rest: Rows(new(x), new(x), new(x)))
    monkeypatch.setattr(log_probs, "logits_gradient_", lambda logits, *rest: logits)
    monkeypatch.setattr(log_probs, "add_product", sum_in_float32)


def sum_in_float32(total, gradient, states, num_tokens):
    """`torch.addmm(..., out_dtype=float32, out=total)`, which CPUs do not have."""
    if total is not None:
        return total
    dtype = gradient.dtype if len(states) == num_tokens else torch.float32
    return torch.empty(gradient.shape[1], states.shape[1], dtype=dtype)


def model(config, checkpointing=False):
    lm = AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation=attention.PACKED_ATTENTION
    ).eval()
    replace_experts(lm)
    hand_on_bounds(lm)
    for layer in lm.model.layers:
        _set_forward(layer, fsdp_config(1, activation_checkpointing=checkpointing))
        if has_experts(layer):
            layer.register_forward_hook(keep_routing)
    return lm


def packed_input():
    ids = torch.zeros(1, TOKENS, dtype=torch.int64)
    response = torch.zeros(TOKENS, dtype=torch.int64)
    return Packed(ids, ids.clone(), torch.zeros(5, dtype=torch.int32), TOKENS, response, response)


def shape_of(config):
    return model_shape(json.loads(config.to_json_string()))


def prediction(config, checkpointing, has_head):
    """What is predicted beside weights, which the model here does not gather, and gradients."""
    fsdp = fsdp_config(
        dp_shard=1,
        param_dtype=DType.bfloat16,
        accumulation=Accumulation.sharded,
        activation_checkpointing=checkpointing,
    )
    work = Workload(TOKENS, micro_batches=1, chunk_tokens=CHUNK)
    return TrainingMemory(fsdp, shape_of(config), work, has_head=has_head)


def without_weights(parts):
    names = ("activations", "logits", "gradient of the head")
    return sum(parts.get(name, 0) for name in names)


def root_of(lm, has_head, keep_logits):
    root = ScalarModel(lm.model, bias=True)
    if has_head:
        root = TokenLogProbs(lm, CHUNK, keep_logits=keep_logits)
    for param in root.parameters():  # as FSDP2, which reduces them at once
        param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    return root


def answers(root, has_head):
    packed = packed_input()
    return root(packed, 1.0, Entropy.report).log_probs if has_head else root(packed)


MIXTURES = ("qwen3_moe", "qwen2_moe")


def wide(name):
    """A family's tiny model with layers wide enough that norms and MLP decide."""
    config = copy.deepcopy(MORE[name])
    config.update({"hidden_size": 512, "intermediate_size": 1024, "num_key_value_heads": 4})
    config.update({"num_hidden_layers": LAYERS, "head_dim": 128, "no_rope_layers": [1] * LAYERS})
    if name in MIXTURES:
        config.update({"moe_intermediate_size": 256, "num_experts": 16, "num_experts_per_tok": 4})
    if name in AFTER_DENSE:
        config.update({"moe_intermediate_size": 256, "n_routed_experts": 16, "v_head_dim": 96})
        config.update({"qk_rope_head_dim": 32, "head_dim": 32})
        config.update({"q_lora_rank": 256, "kv_lora_rank": 128, "qk_nope_head_dim": 96})
        config.mlp_layer_types = ["dense", *["sparse"] * (LAYERS - 1)]
    if name == "gemma4":
        config.update({"per_layer_config": {}, "num_kv_shared_layers": 1})
    if name == "phi3":
        config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4}
        config.rope_parameters["partial_rotary_factor"] = 1.0
    if name in RECURRENT:
        config.update({"linear_key_head_dim": 64, "linear_value_head_dim": 64})
        config.update({"mamba_num_heads": 16, "mamba_head_dim": 64, "ssm_state_size": 64})
        config.chunk_size = 64
    if kinds := config.to_dict().get("layer_types"):
        first = kinds[:1] if name in RECURRENT else ["full_attention"]
        config.layer_types = [*first * (LAYERS - 1), "full_attention"]
    if name == "gpt_oss":
        config.layer_types[::2] = ["sliding_attention"] * 2
    return config


PEAKS = (QWEN, WIDE, wide("qwen3_moe"))


@pytest.mark.parametrize("has_head", [True, False], ids=["actor", "critic"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["keep", "recompute"])
@pytest.mark.parametrize("config", PEAKS, ids=["qwen", "wide", "experts"])
def test_peak_of_an_update_is_predicted_to_15_percent(config, checkpointing, has_head):
    with FakeTensorMode():
        root = root_of(model(config, checkpointing), has_head, not checkpointing)
        with Allocations() as counted:
            counted.ignore(*root.parameters(), *root.buffers())
            loss = answers(root, has_head).sum()
            counted.peak = 0
            loss.backward()
    memory = prediction(config, checkpointing, has_head)
    points = [memory.last_layer(), *([memory.loss()] if has_head else [])]
    assert max(map(without_weights, points)) == pytest.approx(counted.peak, rel=0.15)


@pytest.mark.parametrize("has_head", [True, False], ids=["actor", "critic"])
@pytest.mark.parametrize("config", PEAKS, ids=["qwen", "wide", "experts"])
def test_peak_of_scoring_is_predicted_to_a_tenth(config, has_head):
    with FakeTensorMode(), torch.no_grad():
        root = root_of(model(config), has_head, True)
        with Allocations() as counted:
            counted.ignore(*root.parameters(), *root.buffers())
            answers(root, has_head)
    predicted = without_weights(prediction(config, False, has_head).score())
    assert predicted == pytest.approx(counted.peak, rel=0.1)


HYBRIDS = ("qwen3_5", "lfm2", "nemotron_h", "gpt_oss", "gemma4")
LATER = ("ministral3", "exaone4", "glm4", "stablelm", "seed_oss", "nemotron", *HYBRIDS)
FAMILIES = ("mistral", "phi3", "olmo2", "olmo3", "granite", "smollm3", *LATER)

LONG = (*FAMILIES, "qwen2_moe", *AFTER_DENSE)


@pytest.mark.parametrize(
    "config",
    [
        *(QWEN, WIDE, HEAD_NORMS, wide("gemma3"), wide("qwen3_moe")),
        *(pytest.param(wide(name), marks=pytest.mark.slow) for name in LONG),
    ],
    ids=["qwen", "wide", "head norms", "gemma3", "qwen3_moe", *LONG],
)
def test_what_layers_keep_is_predicted_to_15_percent(config):
    """Over all layers and what surrounds them, the head's states apart."""
    saved = {}

    def note(tensor):
        saved[id(tensor.untyped_storage())] = tensor
        return tensor

    with FakeTensorMode():
        lm = model(config)
        root = lm.model
        weights = {id(param.untyped_storage()) for param in root.parameters()}
        packed = packed_input()
        one = torch.zeros(2, dtype=torch.int32)  # bounds: recurrences pad to the longest
        with (
            packed_recurrences(lm) as recurrent,
            torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        ):
            root(
                input_ids=packed.input_ids,
                position_ids=packed.position_ids,
                use_cache=False,
                cu_seq_lens_q=one,
                max_length_q=packed.max_length,
                **({"seq_idx": packed.input_ids} if recurrent else {}),
            )
    found = sum(t.untyped_storage().nbytes() for k, t in saved.items() if k not in weights)
    kept = LAYERS * kept_by_layer(shape_of(config), 2, compiled=False)
    assert kept == pytest.approx(found / TOKENS, rel=0.15)


def gathered_bytes(micro_batches, **changes):
    """What the peak of an update of QWEN on four ranks holds, and all weights in bfloat16."""
    fsdp = fsdp_config(dp_shard=4, param_dtype=DType.bfloat16, **changes)
    work = Workload(TOKENS, micro_batches, chunk_tokens=CHUNK)
    memory = TrainingMemory(fsdp, shape_of(QWEN), work, has_head=True)
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(QWEN, dtype=torch.bfloat16)
    return memory.update(), sum(param.nbytes for param in lm.parameters())


@pytest.mark.parametrize("accumulation", list(Accumulation))
def test_weights_that_stay_gathered_are_all_there_beside_the_gradients(accumulation):
    changes = {"reshard_after_forward": False, "accumulation": accumulation}
    kept, whole = gathered_bytes(2, **changes)
    assert kept["gathered weights"] == whole
    # float32 gradients of the whole model, twice its bfloat16 weights, or of a fourth of it
    share = 1 if accumulation is Accumulation.full else 4
    assert kept["gradients"] == 2 * whole // share


def test_a_single_backward_drops_weights_as_it_gets_their_gradients():
    """At its first layer, as much is gathered as if nothing stayed after forward."""
    points = []
    for keeps in (True, False):
        fsdp = fsdp_config(dp_shard=4, param_dtype=DType.bfloat16, reshard_after_forward=not keeps)
        work = Workload(TOKENS, 1, chunk_tokens=CHUNK)
        memory = TrainingMemory(fsdp, shape_of(QWEN), work, has_head=True)
        points.append(memory.end())
    assert points[0] == points[1]


def test_scoring_keeps_no_logits():
    """Two chunks' worth of logits would show: N x V is four chunks."""
    with FakeTensorMode(), torch.no_grad():
        hidden = torch.zeros(TOKENS, 64, dtype=torch.bfloat16)
        weight = torch.zeros(50_000, 64, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.zeros(TOKENS, dtype=torch.int64)
        with Allocations() as counted:
            counted.ignore(hidden, weight)
            log_probs.token_log_probs(
                hidden,
                targets,
                weight,
                temperature=1.0,
                chunk_tokens=CHUNK,
                entropy=Entropy.omit,
                keep_logits=True,
            )
    assert counted.peak == pytest.approx(CHUNK * 50_000 * 2, rel=0.01)
