"""Several data sets: names for rewards and metrics, ids, shares of a step, faults by data set."""

from collections import Counter

import pytest
import torch

from hybridrl.config.choices import Repeated
from hybridrl.config.errors import ConfigError
from hybridrl.config.sections import DataConfig
from hybridrl.data.sources.problem_sets import load_problem_sets
from hybridrl.data.sources.prompt_source import prompt_source
from hybridrl.data.sources.prompts import Prompt, examine_prompts, load_prompts
from hybridrl.trainer.evaluate import tag_groups
from hybridrl.trainer.rewarding import outcome_metrics
from tests.support.data_configs import data_config, jsonl, part, sums
from tests.support.metric_names import unexplained
from tests.support.role_configs import model_config
from tests.support.tokenizer_folders import model_folder


@pytest.fixture
def model(tmp_path):
    texts = [row["question"] for row in sums(range(60))] + ["Be brief.", "Think.", "#### 1"]
    return model_config(model_folder(tmp_path / "model", texts))


@pytest.fixture
def config(tmp_path) -> DataConfig:
    """Twelve problems `low` and six `high`, drawn 3 to 1; the last two of each are held out."""
    low, high = tmp_path / "low.jsonl", tmp_path / "high.jsonl"
    jsonl(low, sums(range(12)))
    jsonl(high, [{"q": row["question"], "a": row["answer"]} for row in sums(range(50, 56))])
    return data_config(
        num_eval_problems=2,
        mixture={
            "low": part(3.0, train_files=str(low)),
            "high": part(1.0, train_files=[str(high)], prompt_key="q", answer_key="a"),
        },
    )


def faults_of(config: DataConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        load_problem_sets(config)
    return str(caught.value)


def test_each_data_set_has_its_own_columns_and_numbers(config, model):
    sets = load_prompts(config, model, 100)
    low, high = sets.data_sets
    assert (low.name, low.share, low.train, low.held_out) == ("low", 0.75, 10, 2)
    assert (high.name, high.share, high.train, high.held_out) == ("high", 0.25, 4, 2)
    assert low.source.endswith("low.jsonl")
    assert sets.notes[0].startswith("low: the last 2 problems of data.mixture.low.train_files")


def test_training_prompts_are_numbered_before_held_out_ones_over_all_data_sets(config, model):
    sets = load_prompts(config, model, 100)
    assert [prompt.prompt_id for prompt in sets.train] == list(range(14))
    assert [prompt.prompt_id for prompt in sets.held_out] == [14, 15, 16, 17]
    assert [prompt.dataset for prompt in sets.train] == ["low"] * 10 + ["high"] * 4


def test_rewards_see_the_data_set_and_held_out_accuracy_is_told_apart(config, model):
    sets = load_prompts(config, model, 100)
    assert {(p.dataset, p.example["dataset"]) for p in sets.train} == {
        ("low", "low"),
        ("high", "high"),
    }
    assert sets.train[10].example["answer"] == "#### 51"
    assert tag_groups(sets.held_out, taken=set()) == {"low": [0, 1], "high": [2, 3]}


def test_steps_keep_the_shares_and_data_sets_their_epochs(config, model):
    source = prompt_source(load_prompts(config, model, 100), config, seed=1)
    steps = [source.take(4) for _ in range(40)]
    assert all(Counter(p.dataset for p in step) == {"low": 3, "high": 1} for step in steps)
    drawn = [p.prompt_id for step in steps for p in step if p.dataset == "high"]
    assert all(sorted(drawn[k : k + 4]) == [10, 11, 12, 13] for k in range(0, 40, 4))


def test_mean_rewards_by_data_set():
    prompts = [Prompt(i, [], "", "", {}, {}, name) for i, name in enumerate(["a", "b", "a", "a"])]
    metrics = outcome_metrics(prompts, torch.tensor([1.0, 0.5, 0.0, 0.5]), torch.zeros(4))
    means = {name: value for name, value in metrics.items() if name.startswith("reward/mean_")}
    assert means == {"reward/mean_a": 0.5, "reward/mean_b": 0.5}
    assert unexplained(metrics) == []
    plain = outcome_metrics([Prompt(0, [], "", "", {}, {})], torch.ones(1), torch.zeros(1))
    assert plain.keys() == {"reward/mean", "reward/std", "reward/overlong_penalty"}


def test_a_data_set_may_have_a_system_prompt_of_its_own(config, model):
    config.system_prompt = "Think."
    config.mixture["high"].system_prompt = "Be brief."
    sets = load_prompts(config, model, 100)
    assert sets.train[0].text.startswith("<|system|>Think.<|user|>")
    assert sets.train[10].text.startswith("<|system|>Be brief.<|user|>")


def test_a_system_prompt_that_no_chat_messages_take_is_named_with_its_data_set(
    config, model, tmp_path
):
    messages = [[{"role": "user", "content": row["question"]}] for row in sums(range(20, 30))]
    chats = jsonl(tmp_path / "c.jsonl", [{"question": m, "answer": "1"} for m in messages])
    config.system_prompt = "Think."
    config.mixture["chats"] = part(1.0, train_files=str(chats))
    assert examine_prompts(config, model, 100)[1] == []  # others take it
    config.mixture["chats"].system_prompt = "Be brief."
    (fault,) = examine_prompts(config, model, 100)[1]
    assert fault.startswith("data.mixture.chats.system_prompt = 'Be brief.' has no effect")


def test_faults_of_all_data_sets_come_together_with_their_keys(config, tmp_path):
    config.mixture["low"].prompt_key = "text"
    config.mixture["high"].train_files = str(tmp_path / "none.jsonl")
    config.mixture["more"] = part(1.0, name="embedded/steps_9")
    report = faults_of(config)
    assert report.startswith("3 problems")
    assert "data.mixture.low.prompt_key = text" in report
    assert "Set data.mixture.low.prompt_key to one of them" in report
    assert "data.mixture.high.train_files = " in report
    assert "data.mixture.more.name = embedded/steps_9, expected embedded or embedded/s" in report


def test_a_data_set_too_small_for_its_weight_is_refused(config):
    # Of 8 prompts up to 8 * 3/4 + 1 = 7 are `low`, which has 10, and up to 3 are `high`.
    config.prompts_per_step = 8
    load_problem_sets(config)
    config.prompts_per_step = 16
    report = faults_of(config)
    assert "data.mixture.low has 10 training problems" in report
    assert "draws up to 13 of them" in report
    assert "data.mixture.high has 4 training problems" in report
    assert "draws up to 5 of them" in report


def test_a_question_in_two_data_sets_can_be_dropped_from_the_later(config, tmp_path):
    high = tmp_path / "high.jsonl"
    shared = sums(range(3))
    own = sums(range(50, 56))
    jsonl(high, [{"q": row["question"], "a": row["answer"]} for row in shared + own])
    assert load_problem_sets(config)["high"].left_out == {}
    config.duplicates = Repeated.drop
    sets = load_problem_sets(config)
    assert sets["high"].left_out == {"repeated": 3}
    assert sets["low"].left_out == {"repeated": 0}


def test_what_one_data_set_holds_out_no_other_trains_on(config, tmp_path):
    # `low` holds out "What is 10 + 1?" and "What is 11 + 1?".
    rows = sums(range(11, 12)) + sums(range(50, 56))
    jsonl(tmp_path / "high.jsonl", [{"q": r["question"], "a": r["answer"]} for r in rows])
    sets = load_problem_sets(config)
    assert sets["high"].left_out == {"held out as well": 1}
    assert len(sets["high"].train) == 4


def test_embedded_problems_come_in_parts_by_steps():
    config = data_config(
        mixture={f"s{n}": part(1.0, name=f"embedded/steps_{n}") for n in (1, 2, 3)}
    )
    sets = load_problem_sets(config)
    whole = load_problem_sets(data_config())[""]
    assert sum(len(of_set.train) for of_set in sets.values()) == len(whole.train)
    assert {p.example["steps"] for p in sets["s2"].train + sets["s2"].held_out} == {2}
