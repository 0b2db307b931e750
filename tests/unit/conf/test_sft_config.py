"""Supervised fine-tuning: what it refuses, what has no effect in it, and its plan."""

import io

import pytest
from rich.console import Console

from hybridrl.controller.worker_group import role_configs
from hybridrl.data.sources.prompts import PromptSets
from hybridrl.plan.tables import plan
from hybridrl.trainer.tracking.header import header_lines
from tests.support.composing import GPU_NODE, LAPTOP, examined, made, mistakes, named
from tests.support.model_shapes import TINY

SFT = ("+recipe=gsm8k_sft", "hardware=cpu")


MISTAKES = """
supervised algorithm.loss.function algorithm/loss=ppo_clip | nll | no old_log_probs, advantages
supervised algorithm.kl.coef algorithm.kl.coef=0.1 | expected 0
supervised rollout.responses_per_prompt rollout.responses_per_prompt=4 \
    | Set rollout.responses_per_prompt=1
no_effect algorithm.lam algorithm.lam=0.9 | algorithm.advantage = none
no_effect algorithm.rollout_correction.high algorithm.rollout_correction.high=3 | advantage = none
no_effect tracking.token_samples tracking.token_samples=1
no_effect critic.optim.lr critic.optim.lr=1e-3
"""


@pytest.mark.parametrize("mistake", mistakes(MISTAKES))
def test_what_has_no_meaning_is_refused(mistake):
    assert made(mistake, *SFT) == [mistake]


def test_its_loss_is_refused_in_reinforcement_learning():
    found = named("hardware=cpu", "algorithm/loss=nll")
    assert found == [("likelihood", "algorithm.loss.function")]


def test_evaluation_may_have_another_temperature_and_answers_a_column_of_their_own():
    overrides = ["rollout.temperature=0.7", "rollout.top_p=0.9", "data.solution_key=solution"]
    found = examined([*SFT, *overrides])
    assert found.report.problems == []
    roles = role_configs(found.config)
    assert (roles["actor"].temperature, roles["rollout"].temperature) == (1.0, 0.7)
    assert roles["rollout"].top_p == 1.0  # nothing is recorded; requests have their own


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
