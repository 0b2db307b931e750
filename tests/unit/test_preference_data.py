"""Preference pairs and labelled completions: forms of their columns, faults by row, their batch."""

from dataclasses import replace

import pytest
import torch

from hybridrl.config.choices import Targets, TooLongPrompts
from hybridrl.data.sources.problem_sets import load_problem_sets
from hybridrl.data.sources.problems import held_out_problems, labelled, pair, train_problems
from hybridrl.data.sources.prompt_source import PromptSource
from hybridrl.data.sources.prompts import Prompt, examine_prompts, load_prompts
from hybridrl.data.sources.tokenizer import load_tokenizer
from hybridrl.rewards.gsm8k import score
from hybridrl.trainer.sft import reference_batch
from tests.support.data_configs import data_config, jsonl
from tests.support.role_configs import model_config
from tests.support.tokenizer_folders import TEMPLATE, model_folder

USER, OTHER = {"role": "user", "content": "What is 1 ?"}, {"role": "user", "content": "And 2 ?"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("1 it is", "it is not 1 or 2"))
PLAIN = {"prompt": USER["content"], "chosen": GOOD["content"], "rejected": BAD["content"]}
# As TRL's and the hub's data sets have them.
FORMS = {
    "texts": PLAIN,
    "messages": {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    "the prompt in both": {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "and in a column": {**PLAIN, "chosen": [USER, GOOD], "rejected": [USER, BAD]},
}
LABELLED = {"prompt": USER["content"], "chosen": GOOD["content"], "label": True}


def config_of(tmp_path, *rows, **changes):
    """The rows, one more of them held out."""
    file = jsonl(tmp_path / "rows.jsonl", [*rows, rows[-1]])
    values = {"prompt_key": "prompt", "answer_key": None, "num_eval_problems": 1}
    values |= {"train_files": str(file), "prompts_per_step": 1, "held_out_overlap": "keep"}
    return data_config(**values | changes)


def model_of(tmp_path):
    texts = [message["content"] for message in (USER, OTHER, GOOD, BAD)]
    return model_config(model_folder(tmp_path / "model", texts, TEMPLATE))


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_pair_gives_the_same_tokens(form, tmp_path):
    config, model = config_of(tmp_path, FORMS[form]), model_of(tmp_path)
    (prompt,) = load_prompts(config, model, 50, 50, Targets.pairs).train
    decode = load_tokenizer(model).decode
    assert decode(prompt.token_ids) == "<|user|>What is 1 ?<|assistant|>"
    assert [decode(ids) for ids, _ in prompt.responses] == [
        "1 it is<|end|>",
        "it is not 1 or 2<|end|>",
    ]
    assert [preferred for _, preferred in prompt.responses] == [True, False]


@pytest.mark.parametrize("completion", [GOOD["content"], [GOOD], [USER, GOOD]])
def test_a_completion_has_its_label(completion, tmp_path):
    rows = [LABELLED | {"chosen": completion, "label": label} for label in (True, False)]
    config = config_of(tmp_path, *rows, prompts_per_step=2)
    first, second = load_prompts(config, model_of(tmp_path), 50, 50, Targets.labels).train
    assert (first.is_desired, second.is_desired) == (True, False)
    assert first.responses == [(first.answer_ids, True)]
    assert second.responses == [(first.answer_ids, False)]


FAULTS = [
    ({"rejected": GOOD["content"]}, "`chosen` and `rejected` are equal"),
    ({"rejected": None}, "`rejected` is null"),
    ({"chosen": 3}, "`chosen` is a number"),
    ({"chosen": " "}, "`chosen` is empty"),
    ({"chosen": [USER]}, "the last message of `chosen` is from the user"),
    ({"chosen": [GOOD | {"content": " "}]}, "the last message of `chosen` is empty"),
    ({"chosen": [USER, GOOD], "rejected": [OTHER, BAD]}, "have different messages before"),
    ({"chosen": [BAD, USER, GOOD]}, "messages of the assistant before the last, but no prompt"),
]


@pytest.mark.parametrize(("change", "says"), FAULTS, ids=[says for _, says in FAULTS])
def test_a_fault_is_named_with_its_row(change, says, tmp_path):
    config = config_of(tmp_path, PLAIN | change, PLAIN)
    (fault,) = examine_prompts(config, model_of(tmp_path), 50, 50, Targets.pairs)[1]
    assert f"{tmp_path}/rows.jsonl:1: " in fault and says in fault
    assert "text or messages that end with the assistant's in `rejected`" in fault


@pytest.mark.parametrize("label", [2, "yes", None])
def test_a_label_is_true_or_false(label, tmp_path):
    config = config_of(tmp_path, LABELLED | {"label": label}, LABELLED)
    (fault,) = examine_prompts(config, model_of(tmp_path), 50, 50, Targets.labels)[1]
    assert "rows.jsonl:1: `label` is" in fault and "expected true or false" in fault


def test_missing_columns_are_named_with_their_keys(tmp_path):
    config, model = config_of(tmp_path, {"prompt": "What is 1 ?", "best": "1"}), model_of(tmp_path)
    faults = examine_prompts(config, model, 50, 50, Targets.pairs)[1]
    assert [fault.partition(":")[0] for fault in faults] == [
        "data.chosen_key = chosen",
        "data.rejected_key = rejected",
    ]
    faults = examine_prompts(config, model, 50, 50, Targets.labels)[1]
    assert "data.chosen_key = chosen" in faults[0] and "data.label_key = label" in faults[1]
    texts = config_of(tmp_path, {"chosen": "1", "rejected": "2"})
    (fault,) = examine_prompts(texts, model, 50, 50, Targets.pairs)[1]
    assert fault.startswith("data.prompt_key = prompt")


def test_the_longer_response_of_a_pair_counts_against_the_limit(tmp_path):
    config, model = config_of(tmp_path, PLAIN), model_of(tmp_path)
    (prompt,) = load_prompts(config, model, 50, 50, Targets.pairs).train
    limit = len(prompt.answer_ids)
    (fault,) = examine_prompts(config, model, 50, limit, Targets.pairs)[1]
    assert f"rollout.max_response_tokens={len(prompt.rejected_ids)}" in fault
    dropping = replace(config, too_long_prompts=TooLongPrompts.drop)
    (fault,) = examine_prompts(dropping, model, 50, limit, Targets.pairs)[1]
    assert "there are 0 training problems" in fault


def prompts(*rows):
    return [
        Prompt(n, [1, 2], "", "", {}, {}, answer_ids=better, rejected_ids=worse, is_desired=label)
        for n, (better, worse, label) in enumerate(rows)
    ]


def test_a_pair_is_one_episode_of_two_rows():
    batch = reference_batch(prompts(([3, 4], [5], None), ([6], [7, 8, 9], None)))
    assert [row.tolist() for row in batch.responses.rows()] == [[3, 4], [5], [6], [7, 8, 9]]
    assert batch.episode.tolist() == [0, 0, 1, 1] and batch.group_id.tolist() == [0, 0, 1, 1]
    assert [row.all() for row in batch.preferred.rows()] == [True, False, True, False]


def test_a_labelled_completion_is_an_episode_and_an_answer_has_no_label():
    labelled = reference_batch(prompts(([3], [], False), ([4, 5], [], True)))
    assert labelled.episode is None and labelled.preferred.values.tolist() == [False, True, True]
    assert "preferred" not in reference_batch(prompts(([3], [], None))).added


def test_the_embedded_problems_have_right_and_wrong_solutions():
    """Of both splits, the same in every run."""
    for problem in [*train_problems(300), *held_out_problems()]:
        made, one = pair(problem), labelled(problem)
        assert made == pair(problem) and one == labelled(problem)
        rewards = [score("", made[column], problem) for column in ("chosen", "rejected")]
        assert rewards == [1.0, 0.0]
        assert one["chosen"] == made["chosen" if one["label"] else "rejected"]
        assert made["rejected"].splitlines()[-1].startswith("#### ")
    sets = load_problem_sets(data_config(), Targets.pairs)[""]
    assert all(problem.rejected for problem in [*sets.train, *sets.held_out])
    assert not load_problem_sets(data_config())[""].train[0].rejected


def test_the_response_to_another_prompt_is_the_next_ones_of_another_text():
    rows = [
        replace(p, token_ids=ids)
        for p, ids in zip(prompts(*[([3], [], True)] * 4), ([1], [1], [2], [2]), strict=True)
    ]
    source = PromptSource(rows, 2, seed=1)
    assert [source.after(row).prompt_id for row in rows] == [2, 2, 0, 0]
    same = PromptSource(rows[:2], 2, seed=1)
    assert same.after(rows[0]) is rows[0]
    first = [prompt.prompt_id for prompt, _ in zip(source.from_start(), range(4), strict=False)]
    assert source.position == 0 and [p.prompt_id for p in source.take(4)] == first


def test_lengths_of_tokens_are_those_of_the_rows():
    batch = reference_batch(prompts(([3, 4], [5], None)))
    assert batch.by_episode().responses.lengths.tolist() == [3]
    assert torch.equal(batch.num_tokens, torch.tensor([4, 3]))
