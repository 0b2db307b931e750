"""DPO, IPO and KTO: the roles they need, what they refuse, and how plan and header name them."""

import io

import pytest
from rich.console import Console

from hybridrl.config.estimators import trains_policy, uses_critic
from hybridrl.config.planner.memory import workload
from hybridrl.controller.worker_group import role_configs
from hybridrl.data.schedule import update_sizes
from hybridrl.data.sources.prompts import PromptSets
from hybridrl.plan.tables import plan
from hybridrl.trainer.tracking.header import header_lines
from tests.support.composing import LAPTOP, examined, made, mistakes, named
from tests.support.model_shapes import TINY

DPO = ("+recipe=gsm8k_dpo", "hardware=cpu")
MISTAKES = """
range algorithm.loss.args.beta algorithm.loss.args.beta=0 | weight of the KL
range algorithm.loss.args.label_smoothing algorithm.loss.args.label_smoothing=0.5 | below 0.5
supervised algorithm.aggregation algorithm.aggregation=token_mean | expected sequence_mean \
    | a mean over preference pairs
supervised algorithm.kl.coef algorithm.kl.coef=0.1 | expected 0
no_effect data.label_key data.label_key=good | set algorithm=kto
no_effect critic.optim.lr critic.optim.lr=1e-3
unknown_metric checkpoint.keep_best checkpoint.keep_best=eval/preference_accurcy \
    | Did you mean eval/preference_accuracy
"""


@pytest.mark.parametrize("mistake", mistakes(MISTAKES))
def test_what_has_no_meaning_is_refused(mistake):
    assert made(mistake, *DPO) == [mistake]


@pytest.mark.parametrize("loss", ["dpo", "ipo", "kto", "bradley_terry"])
def test_in_reinforcement_learning_they_are_refused(loss):
    found = examined(["hardware=cpu", f"algorithm/loss={loss}"]).report.problems
    assert [problem.id for problem in found] == ["likelihood"]
    assert f"Set algorithm={loss} to train on" in found[0].remedy


def test_columns_have_an_effect_on_those_that_read_them():
    found = named(*DPO, "algorithm=kto", "data.rejected_key=x")
    assert found == [("no_effect", "data.rejected_key")]
    assert named("hardware=cpu", "data.chosen_key=x") == [("no_effect", "data.chosen_key")]
    assert named(*DPO, "algorithm=kto", "data.chosen_key=x", "data.label_key=y") == []
    assert named(*DPO, "data.chosen_key=x", "ref.log_prob_chunk_tokens=9") == []


def test_the_reference_is_at_temperature_1_and_needs_no_penalty():
    found = examined([*DPO, "rollout.temperature=0.7"])
    roles = role_configs(found.config)
    assert roles["ref"].temperature == roles["actor"].temperature == 1.0
    assert roles["rollout"].temperature == 0.7
    assert "ref" not in role_configs(examined(["+recipe=gsm8k_sft", "hardware=cpu"]).config)


def test_a_reward_model_is_trained_in_the_critics_place():
    config = examined([*DPO, "algorithm=bradley_terry", "critic.optim.lr=1e-3"]).config
    roles = role_configs(config)
    assert roles["critic"].worker.endswith(".RewardTrainer") and "ref" not in roles
    assert uses_critic(config) and not trains_policy(config, step=9)
    assert update_sizes(config.actor, 1, examined(DPO).shape).whole_episodes


def test_a_reward_is_not_needed():
    rows = ["data.answer_key=null", "reward=none", "~eval.rules.flexible"]
    assert examined([*DPO, *rows]).report.problems == []


def test_both_responses_of_a_pair_are_planned_for():
    pairs, labels = (examined([*DPO, f"algorithm={name}"]) for name in ("dpo", "kto"))
    of_pairs, of_labels = workload(pairs.config), workload(labels.config)
    assert of_pairs.micro_batches == 2 * of_labels.micro_batches
    sizes = [update_sizes(one.config.actor, 1, one.shape) for one in (pairs, labels)]
    assert [size.whole_episodes for size in sizes] == [True, False]


def test_plan_and_header_name_pairs_and_the_reference():
    found = examined(DPO)
    file = io.StringIO()
    Console(width=160, file=file).print(plan(found.config, found.shape, LAPTOP))
    assert "preference pairs a step" in file.getvalue()
    assert "ReferenceWorker" in file.getvalue()
    prompts = PromptSets([], [], [])
    lines = dict(header_lines(found.config, "here", "a machine", prompts, TINY["vocab_size"]))
    on = "supervised fine-tuning on preference pairs, dpo (beta 0.1, label_smoothing 0.0), lr 0.0"
    assert lines["method"].startswith(on)
    assert lines["batch"].startswith("64 preference pairs a step; 1 update of 64")
