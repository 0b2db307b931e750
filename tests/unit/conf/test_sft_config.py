"""Supervised fine-tuning: what it refuses, what has no effect in it, and its plan."""

import io

import pytest
from rich.console import Console

from hybridrl.controller.worker_group import role_configs
from hybridrl.data.sources.prompts import PromptSets
from hybridrl.plan.tables import plan
from hybridrl.trainer.tracking.header import header_lines
from tests.support.composing import GPU_NODE, LAPTOP, examined, problems
from tests.support.model_shapes import TINY

SFT = ("+recipe=gsm8k_sft", "hardware=cpu")
LOSS = "algorithm.loss.function"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["algorithm/loss=ppo_clip"],
            [f"{LOSS} = ppo_clip, expected nll", "no old_log_probs, advantages"],
        ),
        (["algorithm.kl.coef=0.1"], ["algorithm.kl.coef = 0.1", "expected 0"]),
        (
            ["rollout.responses_per_prompt=4"],
            ["rollout.responses_per_prompt = 4", "Set rollout.responses_per_prompt=1"],
        ),
        (["algorithm.lam=0.9"], ["algorithm.lam", "no effect", "algorithm.advantage = none"]),
        (
            ["algorithm.rollout_correction.high=3"],
            ["algorithm.rollout_correction.high: no effect", "advantage = none"],
        ),
        (["tracking.token_samples=1"], ["tracking.token_samples", "no effect"]),
        (["critic.optim.lr=1e-3"], ["critic.optim.lr", "no effect"]),
    ],
)
def test_what_has_no_meaning_is_refused(overrides, words):
    found = problems(*SFT, *overrides)
    assert len(found) == 1
    assert all(word in found[0] for word in words), found


def test_its_loss_is_refused_in_reinforcement_learning():
    (found,) = problems("hardware=cpu", "algorithm/loss=nll")
    assert f"{LOSS} = nll, expected a policy loss: it ignores the reward" in found


def test_evaluation_may_have_another_temperature_and_answers_a_column_of_their_own():
    overrides = ["rollout.temperature=0.7", "data.solution_key=solution"]
    found = examined([*SFT, *overrides])
    assert found.report.problems == []
    roles = role_configs(found.config)
    assert (roles["actor"].temperature, roles["rollout"].temperature) == (1.0, 0.7)


def test_engines_decode_all_held_out_problems_together():
    sft = ["+recipe=gsm8k_sft", "hardware=gpu", "data.num_eval_problems=500"]
    assert examined(sft, machine=GPU_NODE).config.rollout.max_num_seqs == 63  # on each of eight


def test_plan_and_header_name_reference_answers_and_no_samples():
    found = examined(SFT)
    file = io.StringIO()
    Console(width=160, file=file).print(plan(found.config, found.shape, LAPTOP))
    text = file.getvalue()
    assert "reference answers a step" in text and "prompts x" not in text
    assert "algorithm.advantage = none needs none" in text
    prompts = PromptSets([], [], [])
    lines = dict(header_lines(found.config, "here", "a machine", prompts, TINY["vocab_size"]))
    assert lines["method"] == "supervised fine-tuning on reference answers, nll, lr 0.0001"
    assert lines["batch"].startswith("64 reference answers a step; 1 update of 64")
