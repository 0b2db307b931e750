"""rollout.weights=fp8: what it does not go with, and what it changes in limits and memory."""

import pytest

from hybridrl.config.derive import FP8_LOG_PROBS, ROUNDED_LOG_PROBS
from hybridrl.config.planner.memory import rollout_parts
from hybridrl.config.planner.model_shape import model_shape
from hybridrl.models.known_shapes import QWEN2_5
from tests.support.composing import GPU_NODE, examined, made, mistakes
from tests.support.model_shapes import QWEN

HEADS = {"head_dim": 128, "max_position_embeddings": 4096}
FP8 = ["hardware=gpu", "rollout.weights=fp8"]
MISTAKES = """
fp8 rollout.weights rollout.exact=true | the same weights
fp8 rollout.dtype rollout.dtype=float32 | quantises bfloat16
"""


@pytest.mark.parametrize("mistake", mistakes(MISTAKES))
def test_what_fp8_does_not_go_with_is_refused(mistake):
    assert made(mistake, *FP8, model=QWEN | HEADS, machine=GPU_NODE) == [mistake]


def test_a_cpu_has_no_such_kernels():
    problems = examined(["hardware=cpu", "rollout.weights=fp8"]).report.problems
    assert [(problem.id, problem.key) for problem in problems] == [
        ("fp8", "rollout.weights"),
        ("fp8", "rollout.dtype"),
    ]


@pytest.mark.parametrize("schedule", ["sync", "partial"])
def test_the_mismatch_is_corrected_and_allowed(schedule):
    """Truncated importance weights are the default; a limit that the user sets stands."""
    same = {"model": QWEN | HEADS, "machine": GPU_NODE}
    overrides = [*FP8, f"rollout.schedule={schedule}"]
    found = examined(overrides, **same)
    assert not found.report.problems
    assert found.config.algorithm.rollout_correction.method == "truncate"
    assert found.config.algorithm.rollout_correction.level == "token"
    assert found.config.trainer.max_log_prob_diff == FP8_LOG_PROBS > ROUNDED_LOG_PROBS
    found = examined([*overrides, "trainer.max_log_prob_diff=0.2"], **same)
    assert found.config.trainer.max_log_prob_diff == 0.2


def test_seven_billion_parameters_take_8_7_gb():
    """As measured, instead of 15.2: all but embedding and head take one byte."""
    shape = model_shape(QWEN2_5["7B"])
    same = {"model": QWEN | HEADS, "machine": GPU_NODE}
    sizes = [
        rollout_parts(examined(given, **same).config, shape, 80 << 30)["rollout weights"]
        for given in (FP8[:1], FP8)
    ]
    assert [size / 1e9 for size in sizes] == pytest.approx([15.2, 8.7], abs=0.05)
