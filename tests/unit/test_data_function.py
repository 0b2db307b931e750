"""data.function: rows that a function returns, called in a process of its own."""

import re

import pytest

from hybridrl.config.errors import ConfigError
from hybridrl.data.sources.problem_sets import load_problem_sets
from tests.support.composing import named, only, problems
from tests.support.data_configs import data_config

OWN = """
import os

def rows(split, *, count, pid=0):
    if split == "test" and count != 3:
        return None
    more = {"process": os.getpid()}
    rows = [{"question": f"{split} {k}?", "answer": k, **more} for k in range(count)]
    return rows + {4: ["row"], 5: [{"question": b"bytes"}]}.get(count, [])

def coins(split, count):
    raise RuntimeError(f"no {count} coins")
"""


@pytest.fixture
def own(tmp_path):
    (file := tmp_path / "own_rows.py").write_text(OWN)
    return str(file)


def load(function: str, **args: object):
    return load_problem_sets(data_config(function=function, args=args, prompts_per_step=2))[""]


def test_the_rows_of_a_function_are_the_problems(own):
    data = load(f"{own}:rows", count=3)
    assert [problem.question for problem in data.train] == ["train 0?", "train 1?", "train 2?"]
    assert [problem.question for problem in data.held_out] == ["test 0?", "test 1?", "test 2?"]
    assert data.train[1].answer == "1" and data.train[1].where.endswith("/train/rows.jsonl:2")
    assert data.source == f"{own}:rows"
    again = load(f"{own}:rows", count=3)
    assert data.train[0].example["process"] == again.train[0].example["process"]


def test_without_held_out_rows_the_last_ones_are_held_out(own):
    data = load(f"{own}:rows", count=12)
    assert [problem.question for problem in data.held_out] == ["train 11?"]
    assert data.notes == ["the last 1 problems of data.function are held out, not trained on"]


@pytest.mark.parametrize(
    ("name", "count", "why"),
    [
        ("coins", 2, "data.function = .*: its call failed: RuntimeError: no 2 coins .*line 12"),
        ("rows", 4, "data.function = .*rows.jsonl:5: expected a JSON object, found text"),
        ("rows", 5, "its call failed: TypeError: Object of type bytes"),
        ("rows", 1, "1 problems in data.function, which leaves none"),
        ("cows", 2, "has no cows; it has rows, coins"),
    ],
)
def test_faults_are_named(own, name, count, why):
    with pytest.raises(ConfigError, match=re.compile(why, re.DOTALL)):
        load(f"{own}:{name}", count=count)


def test_other_sources_and_lone_arguments_are_refused(own, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    given = ["hardware=cpu", f"data.function={own}:rows"]
    assert named(*given, f"data.train_files={tmp_path}/a.jsonl") == [
        ("two_sources", "data.train_files")
    ]
    assert (
        only("hardware=cpu", "+data.args.count=3").remedy
        == "Remove data.args.count, or change data.function"
    )
    assert named(*given, "data.name=embedded/steps_1") == [("no_effect", "data.name")]


def test_an_environment_of_others_names_its_missing_package_and_drops_rules_of_answers(monkeypatch):
    own = ["hardware=cpu", "environment=verifiers", "algorithm=grpo"]
    monkeypatch.setattr("hybridrl.environments.others.base.find_spec", lambda name: None)
    package, env = problems(*own)
    assert package == (
        "environment = verifiers: it needs the package verifiers, which is not installed.\n"
        "Run pip install 'hybridrl[verifiers]'."
    )
    assert env.startswith(
        "agent.args.env = null, expected an environment.\nInstall it, or name its file"
    )
    monkeypatch.setattr("hybridrl.environments.others.base.find_spec", lambda name: True)
    assert problems(*own, "agent.args.env=reverse-text") == []
