"""Loaders of vLLM that do more than copy rectangles: the reshard leaves what they would load.

Of tiny random models of five families; tests/support/loader_cases.py has what
each rank does. Every parameter and buffer of vLLM's model is compared, bit for bit.
"""

import pytest

from tests.support.launch import run_on_ranks
from tests.support.loader_cases import LoaderCase, run_loader_case, write_checkpoints


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """The traces of a case's ranks, after a check that nothing differs from vLLM's own load."""
    root = tmp_path_factory.mktemp("models")

    def of(family, dtype, tp):
        case = LoaderCase(family, dtype, tp)
        if not (root / family).exists():
            write_checkpoints(root, family)
        by_rank = run_on_ranks(run_loader_case, tp, case, root / family)
        for one in by_rank:
            assert one["differs_A"] == one["differs_B"] == [], case
        return [one["trace"] for one in by_rank]

    return of


@pytest.mark.slow
def test_a_buffer_of_the_checkpoint_is_copied(seen):
    (trace,) = seen("gemma4_text", "float32", 1)
    scalars = [f"model.layers.{layer}.layer_scalar" for layer in range(2)]
    assert {c.source for c in trace.copies if c.parameter in scalars} == {*scalars}
    assert not trace.loaded


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tp"), [("float32", 1), ("bfloat16", 2)])
def test_a_function_of_a_weight_is_computed_by_the_loader(seen, dtype, tp):
    for trace in seen("nemotron_h", dtype, tp):
        assert trace.computed == {"model.layers.0.mixer.A"}
        assert [one.name for one in trace.loaded] == ["backbone.layers.0.mixer.A_log"]


@pytest.mark.slow
def test_biases_that_later_ranks_leave_out_are_loaded_on_all(seen):
    """One rank alone needs nothing of the kind; transposed experts are rectangles on both."""
    (alone,) = seen("gpt_oss", "float32", 1)
    assert not alone.loaded
    for trace in seen("gpt_oss", "float32", 2):
        biases = [f"model.layers.{layer}.mlp.experts.down_proj_bias" for layer in range(2)]
        assert [one.name for one in trace.loaded] == biases


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tp"), [("float32", 1), ("bfloat16", 2)])
def test_views_of_a_projection_follow_it(seen, dtype, tp):
    for trace in seen("deepseek_v3", dtype, tp):
        assert not trace.loaded
        assert not [name for name in trace.parameters if name.endswith(("W_UV", "W_UK_T"))]
        assert any(name.endswith("kv_b_proj.weight") for name in trace.parameters)


@pytest.mark.slow
def test_float32_in_an_engine_of_bfloat16_is_not_rounded(seen):
    for trace in seen("qwen3_next", "bfloat16", 2):
        assert any(name.endswith("A_log") for name in trace.dtypes)
        assert not trace.loaded
