"""The keys of checkpoints, resuming and restarts: what is refused, and what to type."""

import pytest
from composing import examined, problems

from hybridrl.config.check_checkpoint import auto_problem


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["resume=/nowhere"], ["resume = /nowhere", "there is no such folder", "resume=<run>"]),
        (["resume='~/nowhere'"], ["resume = ~/nowhere", "there is no such folder"]),
        (["checkpoint.keep_best=accuracy"], ["checkpoint.keep_best = accuracy", "eval/accuracy"]),
        (
            ["trainer.max_restarts=2", "checkpoint.every_steps=0"],
            ["trainer.max_restarts = 2", "checkpoint.every_steps = 0", "begin with the first"],
        ),
        (["checkpoint.on_sigterm=-1"], ["checkpoint.on_sigterm = -1", "at least 0"]),
    ],
)
def test_one_mistake_gets_one_problem(overrides, words):
    (problem,) = problems("hardware=cpu", *overrides)
    assert all(word in problem for word in words), problem


@pytest.mark.parametrize("override", ["keep_best=eval/accuracy", "keep_best=-actor/kl"])
def test_a_metric_may_be_best_where_it_is_largest_or_smallest(override):
    assert problems("hardware=cpu", f"checkpoint.{override}") == []


def test_a_home_folder_may_be_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").mkdir()
    assert problems("hardware=cpu", "resume='~/mine'") == []


@pytest.mark.parametrize("key", ["hydra.run.dir", "hydra.sweep.dir"])
def test_auto_wants_the_directory_to_be_given(key):
    config = examined(["hardware=cpu", "resume=auto"]).config
    problem = auto_problem(config, ["hydra.job.name=x"], key)
    assert problem is not None and f"Set {key}=<directory>" in problem
    assert auto_problem(config, [f"{key}=out"], key) is None
    assert auto_problem(examined(["hardware=cpu"]).config, [], key) is None
