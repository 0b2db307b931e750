"""The keys of checkpoints, resuming and restarts: what is refused, and what to type."""

from itertools import product

import pytest

from hybridrl.config.checks.checkpoint import auto_problem, retention_problems
from hybridrl.trainer.record import is_due
from tests.support.composing import made, mistakes, problems
from tests.support.run_configs import run_config

MISTAKES = f"""
resume_path resume resume=/nowhere | there is no such folder | resume=<run>
resume_path resume resume='~/nowhere' | there is no such folder
resume_path resume resume=/{"x" * 256} | it cannot be read | File name too long | resume=<run>
metric_name checkpoint.keep_best checkpoint.keep_best=accuracy | eval/accuracy
restarts trainer.max_restarts trainer.max_restarts=2 checkpoint.every_steps=0 | begin at the first
range checkpoint.on_sigterm checkpoint.on_sigterm=-1
unknown_metric checkpoint.keep_best checkpoint.keep_best=-eval/nll
unknown_metric checkpoint.keep_best checkpoint.keep_best=eval/accurcy | Did you mean eval/accuracy?
unknown_metric checkpoint.keep_best checkpoint.keep_best=-eval/length | mean eval/length_mean?
unknown_metric checkpoint.keep_best checkpoint.keep_best=eval/x | give eval/accuracy, eval/accuracy_
unknown_metric checkpoint.keep_best checkpoint.keep_best=eval/accuracy_greedy eval.greedy=false \
    | mean eval/accuracy?
"""


@pytest.mark.parametrize("mistake", mistakes(MISTAKES))
def test_one_mistake_gets_one_problem(mistake):
    assert made(mistake, "hardware=cpu") == [mistake]


@pytest.mark.parametrize("name", ["eval/accuracy", "-actor/kl", "eval/accuracy_unseen"])
def test_a_metric_may_be_best_where_it_is_largest_or_smallest(name):
    assert problems("hardware=cpu", f"checkpoint.keep_best={name}") == []


def test_supervised_runs_keep_their_likeliest():
    best = "checkpoint.keep_best=-eval/nll"
    supervised = ["algorithm=sft", "rollout.responses_per_prompt=1"]
    assert problems("hardware=cpu", best, *supervised) == []


def evaluated(total: int, checkpoint: int, evaluation: int) -> set[int]:
    """Steps with a checkpoint and an evaluation, as `TrainingLoop.fit` goes through them."""
    steps = range(1, total + 1)
    saved = {step for step in steps if step % checkpoint == 0 or step == total}
    return saved & {step for step in steps if step == total or is_due(evaluation, step)}


def test_evaluations_must_fall_on_checkpoints_where_some_are_removed():
    config = run_config("checkpoint.keep_best=-eval/accuracy")
    wrong = set()
    for total, (checkpoint, evaluation), keep_last in product(
        [1, 20, 21, 70, 71], [(10, 0), (10, 7), (7, 10), (10, 10)], [0, 1, 2]
    ):
        config.trainer.total_steps = total
        config.checkpoint.every_steps, config.eval.every_steps = checkpoint, evaluation
        config.checkpoint.keep_last = keep_last
        count = -(-total // checkpoint)
        is_wrong = 0 < keep_last < count and evaluated(total, checkpoint, evaluation) == {total}
        wrong |= {(total, checkpoint, evaluation)} if is_wrong else set()
        found = list(retention_problems(config))
        assert len(found) == is_wrong, (config.trainer, config.checkpoint)
        assert all(p.id == "unevaluated_checkpoints" for p in found)
        assert all(f"Set eval.every_steps={checkpoint}, or" in p.remedy for p in found)
    assert {(21, 10, 7), (70, 7, 10), (71, 10, 0)} < wrong and (71, 10, 7) not in wrong
    config.eval.every_steps, config.checkpoint.keep_best = 0, "reward/mean"
    assert not list(retention_problems(config))


def test_a_home_folder_may_be_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").mkdir()
    assert problems("hardware=cpu", "resume='~/mine'") == []


@pytest.mark.parametrize("key", ["hydra.run.dir", "hydra.sweep.dir"])
def test_auto_wants_the_directory_to_be_given(key):
    problem = auto_problem("auto", key, "outputs/${now:%Y}")
    assert problem is not None and problem.id == "resume_auto"
    assert f"Set {key}=<directory>" in problem.remedy
    assert auto_problem("auto", key, "outputs/mine") is None
    assert auto_problem("none", key, "outputs/${now:%Y}") is None
