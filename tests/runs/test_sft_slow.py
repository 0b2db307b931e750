"""Supervised fine-tuning as a run: it learns, resumes exactly, and GRPO starts from it."""

import math

import pytest
from safetensors.torch import load_file

from hybridrl.checkpoint.files import checkpoints_folder, step_name
from tests.support.metric_names import unexplained
from tests.support.runs import SMALL, started

SFT = [
    "+recipe=gsm8k_sft",
    "hardware=cpu",
    "trainer.total_steps=6",
    "data.prompts_per_step=16",
    "data.num_eval_problems=20",
    "eval.every_steps=3",
    "eval.greedy=false",
    "checkpoint.every_steps=3",
    "cluster.gpus_per_node=2",
]
# Not a number of the training, but of the clock.
CLOCK = ("time/", "idle/", "tokens_per_s/", "reshard/", "setup/", "mfu/")

pytestmark = pytest.mark.slow


def finished(folder, *overrides):
    """The rows of a run that must succeed, and its output."""
    with started(folder, *overrides) as run:
        output = run.ended()
        return run.metrics(), output


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sft") / "run"
    return folder, *finished(folder, *SFT)


def test_it_learns_and_has_no_metric_of_sampled_responses(trained):
    _, rows, output = trained
    first, *steps = rows
    assert [row["step"] for row in steps] == [*range(1, 7)]
    assert steps[-1]["eval/nll"] < steps[2]["eval/nll"] < first["eval/nll"]
    assert all(math.isfinite(row["actor/loss"]) and row["actor/grad_norm"] > 0 for row in steps)
    assert all(row["batch/responses"] == 16 for row in steps)
    known = {name for row in rows for name, value in row.items() if value is not None}
    assert not {name for name in known if name.startswith(("reward/", "rollout/", "critic/"))}
    assert unexplained(known) == []
    assert "supervised fine-tuning on reference answers" in output
    assert f"loss {steps[0]['actor/loss']:.4f}" in output


def test_a_resumed_run_equals_one_that_was_not_stopped(trained, tmp_path):
    folder, rows, _ = trained
    middle = checkpoints_folder(folder) / step_name(3)
    again, _ = finished(tmp_path / "again", *SFT, f"resume={middle}")
    pairs = list(zip(rows[4:], [row for row in again if row["step"] > 3], strict=True))
    assert len(pairs) == 3
    for before, now in pairs:
        for name in before.keys() - {n for n in before if n.startswith(CLOCK)}:
            assert before[name] == now[name], name
    ours, theirs = (
        load_file(f / "final" / "model.safetensors") for f in (folder, tmp_path / "again")
    )
    assert all(ours[name].equal(theirs[name]) for name in ours.keys() | theirs.keys())


def test_grpo_starts_from_its_directory(trained, tmp_path):
    folder, _, _ = trained
    overrides = ["+recipe=gsm8k_grpo", *SMALL[1:], f"model.path={folder}"]
    rows, output = finished(tmp_path / "grpo", *overrides, "trainer.total_steps=1")
    assert f"model          {folder}" in output
    assert rows[1]["actor/first_log_ratio_max"] == 0.0
    assert rows[0]["eval/accuracy"] is not None
