"""Recurrent layers on packed tokens compute what transformers does of each sequence alone."""

import inspect
from importlib import import_module

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hybridrl.distributed.forward.attention import PACKED_ATTENTION, register_packed_attention
from hybridrl.distributed.forward.packing import sequence_index
from hybridrl.distributed.forward.recurrent import DELTA_RULE, Recurrence, pack_recurrences
from tests.support.tiny_hf import packed_recurrences

# Of sequences: several; prompts of one token and their responses, shorter than a convolution.
LENGTHS = ([5, 1, 37, 70], [2], [1, 2, 1])
SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MAMBA = {
    "layers_block_type": ["mamba", "attention", "mlp"],
    "num_hidden_layers": 3,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "time_step_min": 1e-9,  # transformers limits steps, vLLM and the packed recurrence do not
}
KINDS = {
    "qwen3_5_text": DELTA,
    "qwen3_next": DELTA | EXPERTS | {"shared_expert_intermediate_size": 32},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "nemotron_h": MAMBA,
}


def outcome(lm, rows, weights, **packing):
    logits = torch.cat([lm(row[None], use_cache=False, **packing).logits[0] for row in rows])
    (logits * weights).sum().backward()
    grads = {name: p.grad.clone() for name, p in lm.named_parameters() if p.grad is not None}
    lm.zero_grad()
    return logits.detach(), grads


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_are_those_alone(kind, lengths):
    register_packed_attention()
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SIZES | KINDS[kind]))
    lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(torch.randn_like(parameter) / 20)
    rows = [torch.randint(5, 290, (n,)) for n in lengths]
    weights = torch.randn(sum(lengths), 300)
    alone, grads = outcome(lm, rows, weights)
    lm.set_attn_implementation(PACKED_ATTENTION)
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    packing = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    packing |= {
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
        "seq_idx": sequence_index(bounds, sum(lengths))[None],
    }
    packing["position_ids"] = torch.cat([torch.arange(n) for n in lengths])[None]
    with packed_recurrences(lm):
        assert pack_recurrences(lm) == pack_recurrences(lm) != set()
        packed, packed_grads = outcome(lm, [torch.cat(rows)], weights, **packing)
        with pytest.raises(ValueError, match="needs"):
            lm(rows[0][None], use_cache=False, cu_seq_lens_q=None)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)
    assert packed_grads.keys() == grads.keys()
    for name, grad in grads.items():
        assert float((packed_grads[name] - grad).norm()) <= 1e-4 * float(grad.norm()) + 1e-4, name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_the_kernel_agrees_with_padded_sequences():
    """Qwen3.5's sizes of heads, in bfloat16; the padded function computes in float32."""
    pytest.importorskip("fla", reason="pip install 'hybridrl[linear-attention]'")
    names = vars(import_module("transformers.models.qwen3_5.modeling_qwen3_5"))
    function = getattr(names[DELTA_RULE], "function", inspect.unwrap(names[DELTA_RULE]))
    assert function.__module__.startswith("transformers.")
    lengths = [5, 1, 200, 700]
    count, bounds = sum(lengths), torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    torch.manual_seed(0)
    shapes = [(1, count, heads, 128) for heads in (16, 16, 32)]
    qkv = [torch.randn(s, device="cuda").bfloat16().requires_grad_() for s in shapes]
    g = torch.nn.functional.logsigmoid(torch.randn(1, count, 32, device="cuda")).requires_grad_()
    beta = torch.rand(1, count, 32, device="cuda").bfloat16().requires_grad_()
    results = []
    for has_kernel in (True, False):
        output, _ = Recurrence(function, has_kernel)(
            *(x.repeat_interleave(32 // x.shape[2], 2) for x in qkv),
            g=g,
            beta=beta,
            use_qk_l2norm_in_kernel=True,
            cu_seq_lens_q=bounds,
            max_length_q=max(lengths),
        )
        weights = torch.linspace(-1, 1, output.numel(), device="cuda").view_as(output)
        grads = torch.autograd.grad((output.float() * weights).sum(), [*qkv, g, beta])
        results.append([output, *grads])
    for one, other in zip(*results, strict=True):
        assert float((one.float() - other.float()).norm() / other.float().norm()) < 0.02
