"""fsdp.share_prefixes: where null is true, what refuses true, and the plan."""

import json

import pytest

from hybridrl.config.planner.model_shape import model_shape
from hybridrl.config.planner.step_time import step_seconds
from tests.support.composing import FASTEST_SET, GPU_NODE, LAPTOP, TINY, examined
from tests.support.model_shapes import QWEN
from tests.support.tiny_vision import VISION
from tests.unit.conf.test_recurrent_config import HYBRID
from tests.unit.conf.test_teacher_config import taught

LONG = {"max_position_embeddings": 4096}
MIXTURE = {"model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 2}
IMAGES = json.loads(VISION["qwen3_vl"].to_json_string())
IMAGES["text_config"] |= LONG


@pytest.mark.parametrize("overrides", [[], ["fsdp.share_prefixes=true"], ["algorithm=ppo"]])
def test_dense_models_share(overrides):
    found = examined(["hardware=cpu", *overrides], machine=LAPTOP, model=TINY)
    assert found.report.problems == []
    assert found.config.fsdp.share_prefixes is found.config.actor.fsdp.share_prefixes is True


@pytest.mark.parametrize(
    ("overrides", "model", "why"),
    [
        ([], TINY | MIXTURE | LONG, "experts of model.path are balanced"),
        (["fsdp.compile=false"], HYBRID, "recurrent layers of model.path"),
        (["fsdp.compile=false"], IMAGES, "images of model.path"),
        (["fsdp.ulysses_size=2"], QWEN, "fsdp.ulysses_size = 2"),
        (["rollout.exact=true"], QWEN | {"head_dim": 64}, "rollout.exact = true"),
    ],
)
def test_others_do_not_and_true_is_refused(overrides, model, why):
    overrides = ["hardware=gpu", *overrides]
    found = examined(overrides, machine=GPU_NODE, model=model)
    assert not [one for one in found.report.problems if one.id == "shared_prefixes"]
    assert found.config.fsdp.share_prefixes is False
    asked = examined([*overrides, "fsdp.share_prefixes=true"], machine=GPU_NODE, model=model)
    (problem,) = [one for one in asked.report.problems if one.id == "shared_prefixes"]
    assert why in problem.why and problem.remedy == "Set fsdp.share_prefixes=null"


@pytest.mark.parametrize(
    ("overrides", "changes"),
    [(["fsdp.param_dtype=float32"], {}), ([], {"head_dim": 512}), ([], {"head_dim": 36})],
)
def test_attention_that_pads_on_gpus_shares_only_if_asked(overrides, changes):
    model, overrides = TINY | LONG | {"model_type": "qwen3"} | changes, ["hardware=gpu", *overrides]
    for value, shares in (("null", False), ("true", True)):
        given = [*overrides, f"fsdp.share_prefixes={value}"]
        found = examined(given, machine=GPU_NODE, model=model)
        assert found.config.fsdp.share_prefixes is shares


@pytest.mark.parametrize(("tokens", "shares"), [(256, True), (257, False)])
def test_on_cpus_short_prompts_alone_are_shared(tokens, shares):
    """Attention pads there: a row would have its whole prompt's memory."""
    overrides = ["hardware=cpu", f"rollout.max_prompt_tokens={tokens}"]
    assert examined(overrides, machine=LAPTOP, model=TINY).config.fsdp.share_prefixes is shares


def test_a_teacher_with_experts_reads_whole_sequences():
    """Its forwards have the policy's micro-batches, which would be too large for it."""
    assert taught().config.fsdp.share_prefixes
    found = taught(**MIXTURE)
    assert not found.config.fsdp.share_prefixes and found.report.problems == []
    (problem,) = taught("fsdp.share_prefixes=true", **MIXTURE).report.problems
    assert "experts of teacher.models = /big" in problem.why


def test_the_plan_counts_prompts_once():
    """8 of 16 responses are in a unit: 1024 + 8 x 256 of 8 x 1280 tokens."""
    seconds = []
    for value in ("false", "true"):
        overrides = ["hardware=gpu", "algorithm=grpo", *FASTEST_SET]
        overrides += ["data.prompts_per_step=16", "rollout.responses_per_prompt=16"]
        overrides += ["rollout.max_prompt_tokens=1024", "rollout.max_response_tokens=256"]
        overrides += ["actor.mini_batch_size=128", f"fsdp.share_prefixes={value}"]
        model = QWEN | LONG
        found = examined(overrides, machine=GPU_NODE, model=model)
        assert found.report.problems == []
        parts = step_seconds(found.config, model_shape(model), (), GPU_NODE.gpus[0])
        seconds.append(parts["old log-probs"])
    assert seconds[1] / seconds[0] == pytest.approx((1024 + 8 * 256) / (8 * 1280), rel=0.05)
