"""Runs that SIGKILL ends anywhere between their checkpoints go on as if it had not."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.support.kill_and_resume import (
    EVERYTHING,
    Timeline,
    assert_same_end,
    draw_kill,
    killed,
    resumed,
    undisturbed,
)

pytestmark = pytest.mark.slow

SEEDS = range(30)
SEEDS_OF = {"split": range(10)}
SCHEDULES = {
    "sync": EVERYTHING,
    "partial": [
        *EVERYTHING,
        "rollout.schedule=partial",
        "rollout.max_versions=3",
        "rollout.max_num_seqs=32",  # a step's responses, so that others are in flight after it
    ],
    "split": [
        *EVERYTHING,
        "rollout.schedule=split",
        "rollout.max_versions=3",
        "rollout.max_num_seqs=32",
        "cluster.gpus_per_node=2",
        "placement.rollout_gpus=1",
    ],
}
CASES = [(name, seed) for name in SCHEDULES for seed in SEEDS_OF.get(name, SEEDS)]
OTHERWISE = {
    "dynamic sampling and lora": [
        *(key for key in EVERYTHING if "critic" not in key),
        "algorithm=dapo",
        "algorithm.kl.coef=0.01",
        "lora=default",
    ],
    "two workers": [*EVERYTHING, "cluster.gpus_per_node=2"],
    "conversations in partial": [
        *SCHEDULES["partial"],
        "environment=calculator",
        "rollout.max_response_tokens=64",
    ],
    "conversations and dynamic sampling in split": [
        *(key for key in SCHEDULES["split"] if "critic" not in key),
        "algorithm=dapo",
        "algorithm.kl.coef=0.01",
        "environment=calculator",
        "rollout.max_response_tokens=64",
    ],
}


@pytest.fixture(scope="module")
def references(tmp_path_factory) -> Callable[[str], tuple[Path, Timeline]]:
    """The undisturbed run of each schedule, to which the others are compared."""

    @cache
    def reference(schedule: str) -> tuple[Path, Timeline]:
        run_dir = tmp_path_factory.mktemp("reference") / "run"
        return run_dir, undisturbed(run_dir, *SCHEDULES[schedule])

    return reference


@pytest.mark.parametrize(("schedule", "seed"), CASES)
def test_a_killed_run_ends_like_the_undisturbed_one(references, tmp_path, schedule, seed):
    overrides, (run_dir, timeline) = SCHEDULES[schedule], references(schedule)
    killed(tmp_path, draw_kill(timeline, seed), *overrides)
    resumed(tmp_path, *overrides)
    assert_same_end(tmp_path, run_dir)


@pytest.mark.parametrize("how", OTHERWISE)
def test_other_runs_end_like_undisturbed_ones(tmp_path, how):
    overrides = OTHERWISE[how]
    timeline = undisturbed(tmp_path / "reference", *overrides)
    for seed in (1, 6):
        killed(tmp_path / str(seed), draw_kill(timeline, seed), *overrides)
        resumed(tmp_path / str(seed), *overrides)
        assert_same_end(tmp_path / str(seed), tmp_path / "reference")
