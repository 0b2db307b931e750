"""A user's reward is tried on a reference answer, in another process, before a run."""

from dataclasses import replace

import pytest

from hybridrl.config.errors import Problem
from hybridrl.rewards.calls import trial_problems
from tests.support.run_configs import run_config

EXAMPLE = {"answer": "7", "level": 2}
REWARD = """
import os, time
{keyword} score(prompt, response, example):
    assert response == "7"
    {line}
"""


def tried(tmp_path, line: str, keyword: str = "def") -> list[Problem]:
    """The problems of a reward with this line."""
    file = tmp_path / "mine.py"
    file.write_text(REWARD.format(line=line, keyword=keyword))
    config = replace(run_config().reward, function=f"{file}:score", args={}, timeout_s=1.0)
    return trial_problems(config, "What?", EXAMPLE, EXAMPLE["answer"])


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("return 'good'", "returned a str, expected a number"),
        ("return float('nan')", "expected a finite number"),
        ("return example['truth']", "KeyError: 'truth'"),
        ("return lenght(response)", "mine.py, line 5"),
        ("return len(os.environ['MY_TOKEN'])", "start without MY_TOKEN.\nTo pass it on"),
    ],
)
def test_a_mistake_is_a_problem_that_names_function_and_cause(tmp_path, monkeypatch, line, told):
    monkeypatch.setenv("MY_TOKEN", "secret")
    (problem,) = tried(tmp_path, line)
    assert str(problem).startswith(f"reward.function = {tmp_path}/mine.py:score")
    assert told in str(problem)


def test_a_row_without_an_answer_is_tried_with_an_empty_response(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def score(prompt, response, example):\n    return example['answer']\n")
    config = replace(run_config().reward, function=f"{file}:score", args={})
    (problem,) = trial_problems(config, "What?", {"level": 2}, "")
    assert problem.id == "trial" and "an empty response to the first row" in problem.why
    assert "KeyError: 'answer'" in problem.why


@pytest.mark.parametrize(
    ("line", "keyword"),
    [
        ("return 0.5", "def"),
        ("return True", "async def"),
        ("raise ConnectionError('no server')", "def"),
        ("time.sleep(60)", "def"),  # as slow as reward.timeout_s does not allow: counted in the run
    ],
)
def test_what_may_be_due_to_others_is_none(tmp_path, line, keyword):
    assert tried(tmp_path, line, keyword) == []
