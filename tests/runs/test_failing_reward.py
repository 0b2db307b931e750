"""Rewards and environments that fail: scored as failed, counted, shown; the run goes on to its end.

Where nothing could be learned, or the user's code ends the process, it stops as a failed run.
"""

import json
import math

import pytest

from tests.support.runs import SMALL, started

REWARD = """
import time

def score(prompt, response, example):
    if len(response) % 2:
        raise ValueError("odd")
    if len(response) % 8 == 0:
        time.sleep(3600)
    return 1.0
"""


@pytest.mark.slow
def test_failing_rewards_are_counted_and_do_not_stop_the_run(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "my_reward.py").write_text(REWARD)
    overrides = ["reward.function=my_reward.score", "reward.timeout_s=0.2"]
    # Each reward that hangs costs a process, of which evaluation needs no more.
    overrides += ["reward.failed_score=-1.0", "data.num_eval_problems=4", "eval.greedy=false"]
    with started(run_dir, *SMALL, *overrides) as run:
        output = run.ended()
        for row in run.metrics()[1:]:
            assert 0 < row["reward/failed"] < 32
            # 32 responses: those that failed count -1, the others 1.
            assert abs(row["reward/mean"] - (32 - 2 * row["reward/failed"]) / 32) < 1e-6
        assert "rewards failed and got reward.failed_score: " in output


OWN = ["eval.greedy=false", "data.num_eval_problems=4"]
FAILS = r"""
def score(prompt, response, example):
    raise ValueError("no such \ud800 unit")
"""
# Not yet in the trial before the run.
ESTIMATES = """
import pathlib, sys

def estimate(rewards, response_mask):
    if pathlib.Path(__file__).with_name("metrics.jsonl").exists():
        sys.exit(0)
    return rewards
"""
LOSES = """
import pathlib, sys

def loss(log_probs, old_log_probs, advantages, response_mask):
    if pathlib.Path(__file__).with_name("metrics.jsonl").exists():
        sys.exit(0)
    return -log_probs * advantages
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "overrides", "says"),
    [
        (
            FAILS,
            ["reward.function=mine.score", *OWN],
            [
                "step 1: all 32 rewards failed",
                'mine.py", line 3, in score',
                r"ValueError: no such \ud800 unit",
            ],
        ),
        (ESTIMATES, ["algorithm.advantage=mine.estimate"], ['mine.py", line 6, in estimate']),
        (
            LOSES,
            ["algorithm.loss.function=mine.loss"],
            ["mine.py"],
        ),
    ],
    ids=["rewards", "estimator", "loss"],
)
def test_what_leaves_nothing_to_learn_fails_the_run(tmp_path, source, overrides, says):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "mine.py").write_text(source)
    with started(run_dir, *SMALL, *overrides) as run:
        output = run.ended(1)
        for text in says:
            assert text in output


TALKS = r"""
import os
import zlib
from hybridrl.environments.base import StepResult

class Talk:
    def __init__(self, example):
        self.turns = 0
        self.question = example["question"]

    def reset(self):
        return "\udc00"

    def step(self, text):
        self.turns += 1
        kind = zlib.crc32(f"{self.question}{text}".encode()) % 12
        if kind == 0:
            raise ValueError("caf\udfff")
        if kind == 1:
            return StepResult("", 1.7e308, self.turns == 2)
        if kind == 2:
            for fd in range(3, 2**15 + 64):
                try:
                    os.write(fd, b"hello")
                except OSError:
                    pass
        return StepResult("caf\ud800", 1.0, self.turns == 2)
"""


@pytest.mark.slow
def test_an_environments_surrogates_and_numbers_reach_no_file_or_metric(tmp_path):
    """Console, rollouts, TensorBoard, metrics: each takes every text of two steps."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "mine.py").write_text(TALKS)
    overrides = ["+recipe=calculator_tool", *SMALL[1:], "environment.function=mine.Talk"]
    overrides += ["environment.stop=['=']", "environment.max_turns=2", *OWN]
    with started(run_dir, *overrides, "trainer.samples_every_steps=1") as run:
        run.ended()
        for row in run.metrics()[1:]:
            assert 0 < row["reward/failed"] < 32
            assert all(value is None or math.isfinite(value) for value in row.values())
    texts = "".join(path.read_text() for path in (run_dir / "rollouts").glob("step_*.jsonl"))
    rows = [json.loads(line) for line in texts.splitlines()]
    # The opening, with its surrogate escaped.
    assert all(row["response"].startswith(r"\udc00") for row in rows)
    reasons = {row["failure"] for row in rows}
    assert r"error: ValueError: caf\udfff" in reasons
    for text in ("expected at most 1e+12", "its process sent an invalid message"):
        assert any(text in str(reason) for reason in reasons)
