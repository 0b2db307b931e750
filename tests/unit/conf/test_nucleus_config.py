"""rollout.top_p below 1: refused where the kept tokens are not recorded, allowed for evaluation."""

import pytest

from hybridrl.config.checks import installation
from tests.support.composing import GPU_NODE, LAPTOP, examined, made, mistakes, named

MISTAKES = """
nucleus rollout.top_p rollout.top_p=0.9 hardware=cpu | on GPUs alone | eval.top_p=0.9
nucleus rollout.top_p rollout.top_p=0.9 rollout.schedule=partial | schedule = partial
nucleus rollout.top_p rollout.top_p=0.9 rollout.schedule=split placement.rollout_gpus=4 \
    | schedule = split
nucleus rollout.top_p rollout.top_p=0.9 environment=calculator | conversations
nucleus rollout.top_p rollout.top_p=0.9 environment=calculator_agent | conversations
range eval.top_p eval.top_p=0
"""


@pytest.mark.parametrize("mistake", mistakes(MISTAKES))
def test_what_records_no_tokens_refuses_a_nucleus(mistake):
    machine = LAPTOP if "hardware=cpu" in mistake.overrides else GPU_NODE
    base = ["hardware=gpu"] if machine is GPU_NODE else []
    assert made(mistake, *base, "+recipe=gsm8k_grpo", machine=machine) == [mistake]


def test_older_releases_record_no_tokens(monkeypatch):
    monkeypatch.setattr(installation, "_version", {"vllm": "0.32.0"}.get)
    overrides = ["hardware=gpu", "rollout.top_p=0.9", "rollout.sleep=all"]
    assert named(*overrides, machine=GPU_NODE) == [("nucleus", "rollout.top_p")]


@pytest.mark.parametrize(
    "overrides",
    [
        ["hardware=gpu", "rollout.top_p=0.9"],
        ["hardware=gpu", "rollout.top_p=0.9", "algorithm=dapo", "algorithm.kl.coef=0.1"],
        ["hardware=cpu", "eval.top_p=0.9"],
        ["hardware=cpu", "+recipe=gsm8k_sft", "rollout.top_p=0.9"],
    ],
)
def test_a_nucleus_of_whole_responses_and_of_evaluations_is_fine(overrides):
    machine = GPU_NODE if "hardware=gpu" in overrides else LAPTOP
    assert examined(overrides, machine=machine).report.problems == []
