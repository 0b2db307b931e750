"""What is not trained on: questions that are held out or repeated, each counted."""

from dataclasses import replace

import pytest

from hybridrl.config.choices import Repeated
from hybridrl.config.errors import ConfigError
from hybridrl.data.sources.problem_sets import (
    load_problem_sets,
    question_of,
    without,
    without_repeats,
)
from hybridrl.data.sources.prompts import load_prompts
from hybridrl.data.sources.rows import Problem
from tests.support.data_configs import data_config, jsonl, sums
from tests.support.role_configs import model_config


def problem(prompt) -> Problem:
    return Problem(prompt, "1", {}, {}, "here")


def asked(*contents: str, system: str = "") -> list[dict]:
    """Chat messages of user and assistant in turn."""
    first = [{"role": "system", "content": system}] if system else []
    roles = ["user", "assistant"] * len(contents)
    return first + [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("What is 1 + 1?", " what  is\n1 + 1? ", True),
        ("What is 1 + 1?", "What is 1 + 2?", False),
        ("What is 1 + 1?", asked("What is 1 + 1?", system="Be brief."), True),
        (asked("A?", "B.", "Go on."), asked("C?", "D.", "Go on."), False),
        (asked("A?", "B.", "Go on."), asked("A?", "b.", "Go on."), True),
    ],
)
def test_questions_are_the_same_by_all_their_texts(one, other, same):
    assert (question_of(problem(one)) == question_of(problem(other))) is same


def test_the_first_of_repeated_questions_stays():
    problems = [problem(text) for text in ["a", "b", "A ", "c", "b"]]
    seen = {question_of(problem("c"))}
    assert [p.prompt for p in without_repeats(problems, seen)] == ["a", "b"]
    assert seen == {("a",), ("b",), ("c",)}
    assert [p.prompt for p in without(problems, {("b",)})] == ["a", "A ", "c"]


@pytest.fixture
def repeated(tmp_path):
    """Ten questions of which two stand twice; three of them are held out, and two more."""
    train = jsonl(tmp_path / "train.jsonl", sums(range(10)) + sums(range(2)))
    held_out = jsonl(tmp_path / "held_out.jsonl", sums(range(7, 12)))
    return data_config(train_files=str(train), eval_files=str(held_out))


def test_held_out_questions_are_not_trained_on_and_counted(repeated):
    sets = load_problem_sets(repeated)[""]
    assert sets.left_out == {"held out as well": 3}
    assert [p.answer for p in sets.train[:7]] == [f"#### {i + 1}" for i in range(7)]
    assert len(sets.train) == 9
    assert len(sets.held_out) == 5


def test_held_out_questions_may_be_kept_with_a_note(repeated):
    sets = load_problem_sets(replace(repeated, held_out_overlap=Repeated.keep))[""]
    assert len(sets.train) == 12
    assert sets.left_out == {}
    assert sets.notes == ["training problems held out as well: 3; held-out accuracy counts them"]


def test_all_held_out_questions_count_even_if_few_are_scored(repeated):
    sets = load_problem_sets(replace(repeated, num_eval_problems=1))[""]
    assert len(sets.held_out) == 1
    assert sets.left_out == {"held out as well": 3}


def test_repeated_questions_are_dropped_on_request(repeated):
    sets = load_problem_sets(replace(repeated, duplicates=Repeated.drop))[""]
    assert sets.left_out == {"held out as well": 3, "repeated": 2}
    assert len(sets.train) == 7


def test_what_is_left_out_is_in_notes_and_counts(repeated):
    config = replace(repeated, duplicates=Repeated.drop, few_shot=1)
    sets = load_prompts(config, model_config("embedded"), 200)
    (facts,) = sets.data_sets
    assert facts.left_out == {
        "held out as well": 3,
        "repeated": 2,
        "shown as examples": 1,
        "longer than 200 tokens": 0,
    }
    assert (facts.train, facts.held_out) == (6, 5)
    assert sets.notes == [
        "training problems left out: 3 held out as well, 2 repeated, 1 shown as examples"
    ]


def test_training_on_the_held_out_file_needs_to_be_asked_for(tmp_path):
    path = str(jsonl(tmp_path / "a.jsonl", sums(range(8))))
    config = data_config(train_files=path, eval_files=path)
    with pytest.raises(ConfigError) as caught:
        load_problem_sets(config)
    assert "0 training problems (left out: 8 held out as well)" in str(caught.value)
    assert "data.held_out_overlap=keep" in str(caught.value)
    kept = load_problem_sets(replace(config, held_out_overlap=Repeated.keep))[""]
    assert len(kept.train) == len(kept.held_out) == 8
