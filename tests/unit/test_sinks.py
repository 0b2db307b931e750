"""Attention with sinks is the softmax over scores and one more, which has no value."""

from itertools import pairwise

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hybridrl.distributed.forward import attention
from hybridrl.distributed.forward.sinks import with_sinks

LENGTHS = [5, 1, 37, 70]
BOUNDS = [0, 5, 6, 43, 113]


def reference(q, k, v, sinks, window):
    """Explicit softmax in float64 or float32, of one sequence after the other."""
    outputs = []
    for start, end in pairwise(BOUNDS):
        one, more = q[start:end].transpose(0, 1), q.shape[1] // k.shape[1]
        keys, values = (x[start:end].transpose(0, 1).repeat_interleave(more, 0) for x in (k, v))
        scores = one @ keys.transpose(1, 2) * q.shape[-1] ** -0.5
        ones = torch.ones(end - start, end - start, dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(~(ones.tril() & ones.triu(1 - window)), -torch.inf)
        last = sinks.to(q.dtype)[:, None, None].expand(-1, end - start, 1)
        outputs.append(torch.cat([scores, last], -1).softmax(-1)[..., :-1] @ values)
    return torch.cat(outputs, 1).transpose(0, 1)


def tensors(device, dtype):
    torch.manual_seed(0)
    shapes = (113, 4, 64), (113, 2, 64), (113, 2, 64), (4,)
    return [torch.randn(s).to(device, dtype).requires_grad_() for s in shapes]


def relative(one, other):
    one, other = one.detach().float(), other.detach().float()
    return float((one - other).norm() / other.norm())


def check(attend, device, dtype, window, tolerance):
    inputs = tensors(device, dtype)
    bounds = torch.tensor(BOUNDS, dtype=torch.int32, device=device)
    output = attend(inputs[:3], (bounds, 70), None, window, sinks=inputs[3])
    exact = [x.detach().float().requires_grad_() for x in inputs]
    expected = reference(*exact, window or 200)
    weights = torch.randn(expected.shape).to(device)
    grads = torch.autograd.grad((output.float() * weights).sum(), inputs)
    wanted = torch.autograd.grad((expected * weights).sum(), exact)
    assert relative(output, expected) < tolerance
    for one, other in zip(grads, wanted, strict=True):
        assert relative(one, other) < tolerance


@pytest.mark.parametrize("window", [None, 16])
def test_padded(window):
    check(attention._padded, "cpu", torch.float32, window, 1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("window", [None, 16])
def test_kernel(window):
    attention.choose_kernel()
    check(with_sinks, "cuda", torch.bfloat16, window, 0.02)


def test_packed_sequences_of_gpt_oss_are_those_alone():
    attention.register_packed_attention()
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 8}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 300}
    config = AutoConfig.for_model("gpt_oss", **sizes, **heads, **experts, pad_token_id=0)
    lm = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    rows = [torch.randint(5, 290, (n,)) for n in LENGTHS]
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(torch.randn_like(parameter) / 10)
        alone = torch.cat([lm(row[None], use_cache=False).logits[0] for row in rows])
        lm.set_attn_implementation(attention.PACKED_ATTENTION)
        bounds = torch.tensor(BOUNDS, dtype=torch.int32)
        positions = torch.cat([torch.arange(n) for n in LENGTHS])
        packing = {"cu_seq_lens_q": bounds, "max_length_q": 70, "position_ids": positions[None]}
        packing |= {"cu_seq_lens_k": bounds, "max_length_k": 70}
        packed = lm(torch.cat(rows)[None], use_cache=False, **packing).logits[0]
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)
