"""FLOPs of Qwen2.5-1.5B, worked by hand."""

from dataclasses import replace

import pytest

from hybridrl.config.planner.flops import (
    attention_flops,
    forward_flops,
    sequence_cost,
    training_flops,
)
from tests.support.model_shapes import QWEN_1_5B, with_window


def test_qwen2_5_1_5b_at_4096_tokens():
    # N = 1,543,714,304 (the model card's 1.54 B); 6 * 28 * 1536 * 4096 = 1,056,964,608
    per_token = 6 * 1_543_714_304 + 1_056_964_608
    batch = 8 * 4096, 8 * attention_flops(QWEN_1_5B, 4096)
    assert training_flops(QWEN_1_5B, *batch) == pytest.approx(8 * 4096 * per_token)
    assert forward_flops(QWEN_1_5B, *batch) == pytest.approx(8 * 4096 * per_token / 3)


def test_attention_costs_what_its_heads_need():
    """Heads may be wider together than hidden states, as Qwen3's: here twice."""
    (layer,) = QWEN_1_5B.kinds
    attention = layer.attention._replace(head_dim=2 * layer.attention.head_dim)
    wide = replace(QWEN_1_5B, kinds=(replace(layer, attention=attention),))
    attention = 6 * 28 * (2 * 1536) * 4096
    assert training_flops(wide, 4096, attention_flops(wide, 4096)) == pytest.approx(
        4096 * (6 * wide.parameters + attention), rel=1e-9
    )
    in_weights = 4096 * 6 * wide.parameters
    assert sequence_cost(wide, 4096) == pytest.approx(in_weights + 3 * 4096 * attention, rel=1e-9)


def test_a_long_sequence_costs_more_than_its_parts():
    # 6 N + 3 * 6 * 28 * 1536 * 8192 = 9,262,285,824 + 6,341,787,648 per token
    whole, halves = sequence_cost(QWEN_1_5B, 8192), 2 * sequence_cost(QWEN_1_5B, 4096)
    assert whole == pytest.approx(8192 * 15_604_073_472)
    assert whole - halves == pytest.approx(3 * 6 * 28 * 1536 * (8192**2 - 2 * 4096**2))


def test_a_window_is_all_that_its_layers_see():
    """Two of 28 layers see 1024 of 4096 tokens: pairs 1024^2 / 2 + 3072 x 1024, x 2 / 4096."""
    windowed = with_window(QWEN_1_5B, 1024, 2)
    seen = 2 * (1024**2 / 2 + 3072 * 1024) / 4096
    attention = 6 * 1536 * (26 * 4096 + 2 * seen)
    expected = 4096 * (6 * windowed.parameters + attention)
    assert training_flops(windowed, 4096, attention_flops(windowed, 4096)) == pytest.approx(
        expected
    )
    assert attention_flops(windowed, 1000) == attention_flops(QWEN_1_5B, 1000)


def test_nothing_costs_nothing():
    assert training_flops(QWEN_1_5B, 0, attention_flops(QWEN_1_5B, 0)) == 0.0
