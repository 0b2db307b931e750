"""Conversations with the calculator as shipped: masked answers, on-policy, computed exactly."""

import json
import math
import re
import shlex
from fractions import Fraction
from operator import add, mul, sub, truediv

import pytest

from tests.support.metric_names import unexplained
from tests.support.runs import ROOT, SMALL, Run, started

RECIPE = ["+recipe=calculator_tool", *SMALL[1:], "eval.greedy=false"]
# A whole line, words before the numbers aside.
ONE_OPERATION = re.compile(r"(?m)^(?:[^\d\n]*[a-z,] )?(\d+) ([-+*/]) (\d+) = (\S+)\n")
OPERATIONS = {"+": add, "-": sub, "*": mul, "/": truediv}
WATCHED = ["trainer.samples_every_steps=1", "rollout.max_response_tokens=64"]


def assert_trained_in_turns(run: Run) -> None:
    """Two steps on conversations, judged by what they leave."""
    output = run.ended()
    assert "at most 6, answered by" in output
    rows = run.metrics()
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert unexplained(rows[1]) == []
    for row in rows[1:]:
        # Were an answer's tokens counted, whose log-probs are 0, neither would be so small.
        assert row["rollout/log_prob_diff_mean"] < 1e-4
        assert row["actor/first_log_ratio_max"] == 0.0
        assert 1.0 < row["rollout/turns_mean"] < row["rollout/turns_max"] <= 6.0
        # Each answer is a space, a number and a line's end.
        assert row["environment/tokens_mean"] > 2 * (row["rollout/turns_mean"] - 2)
        assert row["environment/seconds"] < row["time/rollout_s"]
        assert row["reward/failed"] == 0.0
        assert all(value is None or math.isfinite(value) for value in row.values())


def assert_computed(run: Run) -> None:
    """Behind every line of one operation and `=` stands its value, or that there is none."""
    checked = 0
    for file in sorted((run.run_dir / "rollouts").glob("step_*.jsonl")):
        for line in file.read_text().splitlines():
            text = json.loads(line)["response"]
            for left, sign, right, answer in ONE_OPERATION.findall(text):
                checked += 1
                if sign == "/" and int(right) == 0:
                    assert answer == "?"
                else:
                    assert Fraction(answer) == OPERATIONS[sign](Fraction(left), int(right)), text
    assert checked > 32


@pytest.mark.slow
def test_two_steps_with_the_calculator(tmp_path):
    with started(tmp_path / "run", *RECIPE, *WATCHED) as run:
        assert_trained_in_turns(run)
        assert_computed(run)


TWO = "cluster.gpus_per_node=2"


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        [TWO, "rollout.tensor_parallel_size=2"],
        [TWO],
        ["algorithm=ppo"],
        ["algorithm=remax"],
        ["algorithm=dapo"],
    ],
    ids=["tp2", "dp2", "critic", "greedy_baseline", "dynamic_sampling"],
)
def test_two_steps_otherwise(tmp_path, changes):
    with started(tmp_path / "run", *RECIPE, *WATCHED, *changes) as run:
        assert_trained_in_turns(run)
        assert_computed(run)


@pytest.mark.slow
def test_the_tutorial_on_environments_runs_as_written(tmp_path):
    page = (ROOT / "docs" / "tutorial_environment.md").read_text()
    code, _, command = re.findall(r"```(?:python)?\n(.*?)```", page, re.DOTALL)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "quiz.py").write_text(code)
    recipe, *overrides = shlex.split(command.replace("\\\n", " "))[2:]
    own = [text for text in overrides if text.startswith(("+", "environment"))]
    with started(run_dir, recipe, *SMALL[1:], *own, "eval.greedy=false") as run:
        run.ended()
        for row in run.metrics()[1:]:
            assert row["rollout/turns_max"] == 3.0 and row["reward/failed"] == 0.0
            assert row["rollout/log_prob_diff_mean"] < 1e-4
