"""Preferences as runs: the first margin is 0, and a resume repeats the reference exactly."""

import json
import math

import pytest
from safetensors.torch import load_file

from hybridrl.checkpoint.files import checkpoints_folder, step_name
from hybridrl.data.sources.problems import labelled, pair, train_problems
from tests.support.metric_names import unexplained
from tests.support.runs import started

SMALL = [
    "+recipe=gsm8k_dpo",
    "hardware=cpu",
    "trainer.total_steps=5",
    "data.prompts_per_step=8",
    "eval.every_steps=0",
    "eval.greedy=false",
    "eval.samples=1",
    "checkpoint.every_steps=2",
    "tracking.report=false",
]
# Not a number of the training, but of the clock.
CLOCK = ("time/", "idle/", "tokens_per_s/", "reshard/", "setup/", "mfu/")


def written(folder, columns):
    """Twenty problems, of which 12 are trained on: two steps draw all of them."""
    file = folder / "rows.jsonl"
    rows = [problem | columns(problem) for problem in train_problems(20)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [f"data.train_files={file}", "data.num_eval_problems=8"]


def finished(folder, *overrides):
    """The rows of a run that must succeed, and its output."""
    with started(folder, *overrides) as run:
        output = run.ended()
        return run.metrics(), output


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on pairs over more than two epochs: its overrides, folder, rows and output."""
    folder = tmp_path_factory.mktemp("preferences")
    overrides = [*SMALL, *written(folder, pair)]
    return overrides, folder / "run", *finished(folder / "run", *overrides)


def test_pairs_begin_without_a_margin_and_are_told_apart(trained):
    _, _, rows, output = trained
    before, *steps = rows
    assert "supervised fine-tuning on preference pairs, dpo" in output
    assert before["eval/preference_accuracy"] == 0.0 < steps[-1]["eval/preference_accuracy"]
    assert steps[0]["actor/loss"] == pytest.approx(math.log(2), rel=1e-6)
    margins = [row["actor/reward_margin"] for row in steps]
    assert margins[0] == 0.0 and margins[-1] > margins[1] > 0.0
    assert all(row["batch/responses"] == 16 for row in steps)
    known = {name for row in rows for name, value in row.items() if value is not None}
    assert unexplained(known) == []


@pytest.mark.slow
def test_a_run_that_is_resumed_in_the_second_epoch_is_equal(trained, tmp_path):
    """An earlier step saw its pairs first."""
    overrides, folder, rows, _ = trained
    middle = checkpoints_folder(folder) / step_name(4)
    again, _ = finished(tmp_path / "again", *overrides, f"resume={middle}")
    assert rows[-1]["step"] == again[-1]["step"] == 5
    for name in rows[-1].keys() - {n for n in rows[-1] if n.startswith(CLOCK)}:
        assert rows[-1][name] == again[-1][name], name
    finals = [path / "final" / "model.safetensors" for path in (folder, tmp_path / "again")]
    ours, theirs = map(load_file, finals)
    assert all(ours[name].equal(theirs[name]) for name in ours.keys() | theirs.keys())


@pytest.mark.slow
def test_labels_and_adapters_on_two_ranks(tmp_path):
    """KTO's baseline is 0 in the first step; the reference is the actor without adapters."""
    more = ["algorithm=kto", "cluster.gpus_per_node=2", "lora=default", "actor.optim.lr=3e-3"]
    rows, output = finished(tmp_path / "run", *SMALL, *written(tmp_path, labelled), *more)
    _, *steps = rows
    assert "labelled responses, kto" in output
    assert steps[0]["actor/kl_baseline"] == steps[0]["actor/reward_chosen"] == 0.0
    assert steps[0]["actor/loss"] == pytest.approx(0.5, rel=1e-6)
    assert steps[-1]["actor/reward_chosen"] > steps[-1]["actor/reward_rejected"]
    assert all(row["actor/kl_baseline"] >= 0 and row["batch/responses"] == 8 for row in steps)
    known = {name for row in rows for name, value in row.items() if value is not None}
    assert unexplained(known) == []
