"""rollout.exact: what it needs, and what it leaves without effect."""

import pytest

from tests.support.composing import GPU_NODE, examined, made, mistakes
from tests.support.model_shapes import QWEN

WINDOWS = {"model_type": "mistral", "sliding_window": 512}
HEADS = {"head_dim": 128, "max_position_embeddings": 4096}
MISTAKES = """
exact rollout.exact lora=default rollout.tensor_parallel_size=2 | adapters
exact rollout.exact rollout.schedule=split placement.rollout_gpus=4 | could not be checked
exact rollout.exact environment=calculator_agent agent.other_sampling=mask | precision
exact_kernels rollout.dtype rollout.dtype=float32
exact_kernels fsdp.param_dtype fsdp.param_dtype=float32
exact_kernels fsdp.compile fsdp.compile=false
no_effect algorithm.rollout_correction.method algorithm.rollout_correction.method=mask \
    | do not differ
"""


@pytest.mark.parametrize("mistake", mistakes(MISTAKES))
def test_what_equality_does_not_allow_is_refused(mistake):
    made_ = made(
        mistake, "hardware=gpu", "rollout.exact=true", model=QWEN | HEADS, machine=GPU_NODE
    )
    assert made_ == [mistake]


@pytest.mark.parametrize(
    ("model", "overrides", "word"),
    [
        (QWEN | HEADS | {"head_dim": 96}, [], "heads of 96"),
        (QWEN | HEADS | {"model_type": "olmo2"}, [], "this model is olmo2"),
        (QWEN | HEADS | WINDOWS, [], "layers of model.path see 512 tokens"),
        (QWEN | HEADS | {"vocab_size": 50257}, ["rollout.temperature=0.8"], "no multiple of 16"),
        (QWEN | HEADS | {"vocab_size": 50257}, ["rollout.top_p=0.9"], "no multiple of 16"),
    ],
)
def test_models_that_were_not_compared_are_refused(model, overrides, word):
    overrides = ["hardware=gpu", "rollout.exact=true", *overrides]
    problems = examined(overrides, model=model, machine=GPU_NODE).report.problems
    assert [problem.id for problem in problems] == ["exact"]
    assert word in str(problems[0])


def test_partial_needs_no_correction():
    overrides = ["hardware=gpu", "rollout.exact=true", "rollout.schedule=partial"]
    assert not examined(overrides, model=QWEN | HEADS, machine=GPU_NODE).report.problems


def test_a_cpu_has_no_such_kernels():
    problems = examined(["hardware=cpu", "rollout.exact=true"]).report.problems
    assert {problem.id for problem in problems} == {"exact", "exact_kernels"}


def test_a_nucleus_may_be_exact():
    overrides = ["hardware=gpu", "rollout.exact=true", "rollout.top_p=0.9"]
    assert not examined(overrides, model=QWEN | HEADS, machine=GPU_NODE).report.problems


def test_recipes_that_correct_a_difference_may_be_exact():
    overrides = ["hardware=gpu", "+recipe=gsm8k_grpo", "rollout.exact=true"]
    assert not examined(overrides, model=QWEN | HEADS, machine=GPU_NODE).report.problems
