"""Modules of rollout.exact compute what transformers' do, with the same names; on CPUs, in float32.

The operators' kernels need a GPU (tests/ranks/test_exact_gpu.py); here formulas stand for them.
"""

import copy

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from hybridrl.config.planner.families import EXACT
from hybridrl.distributed.forward import attention, exact, exact_ops

LENGTHS = [25, 15]


def norm(x, weight, eps, kind):
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return normed * (weight + (kind == 2))


def gated(gate, up, kind):
    return (F.silu(gate) if kind == 0 else F.gelu(gate, approximate="tanh")) * up


def attend(q, k, v, bounds, longest, scale):
    output = attention._padded((q, k, v), (bounds, longest) * 2, scale, None)
    return output.contiguous(), q.new_zeros(q.shape[1], q.shape[0])


@pytest.fixture(scope="module", autouse=True)
def formulas():
    for name, formula in (("rms_norm", norm), ("gated", gated), ("attention", attend)):
        vars(exact_ops)[name].register_kernel("cpu")(formula)


def run(lm, ids):
    """Hidden states and all gradients but those through attention, whose backward needs a GPU."""
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    longest = max(LENGTHS)
    sizes = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    sizes |= {"max_length_q": longest, "max_length_k": longest}
    states = lm.base_model(
        input_ids=ids[None], position_ids=positions[None], use_cache=False, **sizes
    ).last_hidden_state
    last = lm.base_model.layers[-1]
    mlp = dict(last.mlp.named_parameters()) | {"norm": lm.base_model.norm.weight}
    grads = torch.autograd.grad(states.square().sum(), [*mlp.values()])
    return states, dict(zip(mlp, grads, strict=True))


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("kind", EXACT)
def test_states_and_gradients_are_those_of_transformers(kind, parts):
    attention.register_packed_attention()
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = AutoConfig.for_model(kind, **sizes, **heads, vocab_size=101, pad_token_id=0)
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config, attn_implementation=attention.PACKED_ATTENTION)
    for parameter in lm.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    shared = copy.deepcopy(lm)
    exact.share_operations(shared, parts)
    assert [*dict(shared.named_parameters())] == [*dict(lm.named_parameters())]
    ids = torch.randint(0, 101, (sum(LENGTHS),))
    (states, grads), (own, own_grads) = run(lm, ids), run(shared, ids)
    torch.testing.assert_close(own, states, rtol=1e-4, atol=1e-5)
    assert own_grads.keys() == grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(own_grads[name], grad, rtol=1e-3, atol=1e-5)
