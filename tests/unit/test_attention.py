"""Packed attention gives every sequence what it gets alone from transformers' own attention."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from hybridrl.distributed.forward import attention
from hybridrl.distributed.forward.attention import (
    PACKED_ATTENTION,
    packed_attention,
    register_packed_attention,
)
from hybridrl.distributed.forward.layers import hand_on_bounds
from tests.support.tiny_hf import ALL, OTHER_HEADS, SIMILAR, SIZES, packed_recurrences, tiny_model

LENGTHS = [7, 1, 12, 3]
TOKENS = torch.randint(0, 67, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
WEIGHTS = torch.randn(sum(LENGTHS), 67, generator=torch.Generator().manual_seed(1))


SEQUENCES = {"seq_idx": torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))[None]}


def packed_logits(model, **more):
    ends = torch.tensor(LENGTHS).cumsum(0)
    cu_seq_lens = torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(torch.int32)
    return model(
        input_ids=TOKENS[None],
        position_ids=torch.cat([torch.arange(n) for n in LENGTHS])[None],
        use_cache=False,
        cu_seq_lens_q=cu_seq_lens,
        cu_seq_lens_k=cu_seq_lens,
        max_length_q=max(LENGTHS),
        max_length_k=max(LENGTHS),
        **more,
    ).logits[0]


def logits_one_by_one(model):
    return torch.cat([model(input_ids=row[None]).logits[0] for row in TOKENS.split(LENGTHS)])


def gradients(model, logits):
    (logits * WEIGHTS).sum().backward()
    return {name: param.grad for name, param in model.named_parameters()}


@pytest.fixture(autouse=True)
def registered():
    register_packed_attention()


# The other mixtures of experts have no attention of their own.
SELDOM = OTHER_HEADS | SIMILAR | {"qwen2_moe", "olmoe", "mixtral"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SELDOM)) for n in ALL]
)
def test_packed_equals_each_sequence_alone(name):
    packed, alone = tiny_model(name, PACKED_ATTENTION), tiny_model(name)
    hand_on_bounds(packed)
    expected = logits_one_by_one(alone)
    with packed_recurrences(packed) as recurrent:
        logits = packed_logits(packed, **(SEQUENCES if recurrent else {}))
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    found, wanted = gradients(packed, logits), gradients(alone, expected)
    for parameter in wanted:
        atol = max(1e-4, 1e-5 * float(wanted[parameter].abs().max()))
        torch.testing.assert_close(found[parameter], wanted[parameter], rtol=1e-4, atol=atol)


def test_sliding_window_is_honoured():
    config = Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=0)
    assert set(config.layer_types) == {"sliding_attention"}
    models = []
    for implementation in (PACKED_ATTENTION, "eager"):
        torch.manual_seed(0)
        models.append(AutoModelForCausalLM.from_config(config, attn_implementation=implementation))
    expected = logits_one_by_one(models[1])
    torch.testing.assert_close(packed_logits(models[0]), expected, rtol=1e-5, atol=1e-5)


def test_a_sequence_does_not_see_its_neighbours():
    """Changing one sequence changes no other's output, bit for bit."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, heads, 9, 8, generator=generator) for heads in (4, 2, 2))
    arguments = {"cu_seq_lens_q": torch.tensor([0, 4, 9], dtype=torch.int32), "max_length_q": 5}
    before, _ = packed_attention(None, q, k, v, None, **arguments)
    for x in (q, k, v):
        x[:, :, :4] += 1.0
    after, _ = packed_attention(None, q, k, v, None, **arguments)
    assert torch.equal(before[:, 4:], after[:, 4:])
    assert not torch.equal(before[:, :4], after[:, :4])


def test_smaller_values_are_exact_with_a_kernel_of_one_size(monkeypatch):
    def kernel(q, k, v, bounds, _, longest, *rest, scale, **named):
        assert q.shape[-1] == k.shape[-1] == v.shape[-1]
        return attention._padded((q, k, v), (bounds, longest) * 2, scale, None)

    sizes = ((4, 8), (2, 8), (2, 6))
    generator = torch.Generator().manual_seed(3)
    qkv = [torch.randn(1, heads, 9, size, generator=generator) for heads, size in sizes]
    arguments = {"cu_seq_lens_q": torch.tensor([0, 4, 9], dtype=torch.int32), "max_length_q": 5}
    expected, _ = packed_attention(None, *qkv, None, **arguments)
    monkeypatch.setattr(attention, "varlen_attn", kernel)
    monkeypatch.setattr(attention, "has_kernel", lambda *of: True)
    output, _ = packed_attention(None, *qkv, None, **arguments)
    assert output.shape == (1, 9, 4, 6)
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("argument", ["softcap", "position_bias"])
def test_what_would_be_ignored_is_refused(argument):
    x = torch.zeros(1, 2, 3, 8)
    with pytest.raises(ValueError, match=argument):
        packed_attention(None, x, x, x, None, **{argument: 1.0})
