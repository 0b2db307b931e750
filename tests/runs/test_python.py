"""Runs from Python: the examples, a run in one call and by hand, callbacks, Ctrl-C."""

import ast
import json
import os
import re
import signal
import time

import pytest

from tests.support.metric_names import check_row
from tests.support.runs import ROOT, SMALL, launched, started

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PATH = {"PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}"}


def test_examples_are_short():
    names = ["own_loop", "own_task", "reshard", "sandboxed_agent", "step", "train"]
    assert [path.stem for path in EXAMPLES] == names
    for path in EXAMPLES:
        assert len(path.read_text().splitlines()) < 60
        page = "agents.md" if path.stem == "sandboxed_agent" else "python.md"
        assert path.name in (ROOT / "docs" / page).read_text()


def test_steps_by_hand_are_on_policy_and_have_their_penalty_in_the_loss(tmp_path):
    """examples/step.py: two steps of GRPO."""
    with launched(tmp_path, "step", f"hydra.run.dir={tmp_path}", env=PATH) as run:
        output = run.ended()
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["status"] == "ok" and result["metric"] == run.metrics()[-1]["eval/accuracy"]
    first, second = run.metrics()  # nobody has asked for the initial model's row
    for row in (first, second):
        check_row(row)
        assert not any("critic" in name or name == "time/values_s" for name in row)
        assert row["actor/kl_coef"] == 0.04
        assert row["actor/kl_loss"] >= 0.0
        assert row["time/old_log_probs_s"] > 0.0 and row["time/ref_log_probs_s"] > 0.0
        # Rollout correction is on by default and finds nothing on a CPU.
        assert row["rollout/correction_weight_mean"] == pytest.approx(1.0, abs=1e-5)
        assert row["rollout/corrected_fraction"] == 0.0
        assert row["rollout/mismatch_ess"] == pytest.approx(1.0, abs=1e-5)
    # The reference is where training began: the first step's KL is 0, the second's is not.
    assert abs(first["actor/kl"]) < 1e-9 < second["actor/kl"]
    assert first["eval/accuracy"] is None
    assert f"\nafter: {second['eval/accuracy']}" in output
    assert f"mean reward {first['reward/mean']} gradient norm {first['actor/grad_norm']}" in output
    scores = [float(text) for text in re.findall(r"\nscore (\S+), advantage", output)]
    assert len(scores) == 4 and "largest advantage" in output


def check(tmp_path, name: str) -> str:
    with launched(tmp_path, "tests.support.from_python", name, str(tmp_path)) as run:
        return run.ended()


@pytest.mark.slow
def test_two_runs_in_one_process_are_alike_and_leave_it_as_it_was(tmp_path):
    check(tmp_path, "twice")


@pytest.mark.slow
def test_a_failing_callback_ends_its_run_and_a_stopping_one_too(tmp_path):
    check(tmp_path, "failing")
    assert "a mistake at step 1" not in (tmp_path / "stopped" / "main.log").read_text()


@pytest.mark.slow
def test_a_trainer_that_nobody_closes_leaves_nothing(tmp_path):
    assert "\nreward 0." in check(tmp_path, "forgotten")


@pytest.mark.slow
def test_ctrl_c_closes_a_trainer(tmp_path):
    with launched(tmp_path, "tests.support.from_python", "interrupted", str(tmp_path)) as run:
        run.wait_for('"step": 2')
        os.killpg(run.process.pid, signal.SIGINT)
        start = time.monotonic()
        output = run.output(timeout=30)
        assert time.monotonic() - start < 15
        assert run.process.returncode != 0
        assert output.endswith("Interrupted: Stopped by SIGINT\n"), output  # KeyboardInterrupt
        run.assert_nothing_left()


@pytest.mark.slow
def test_callbacks_of_the_config_work_on_the_command_line(tmp_path):
    """The run ends after the step in which one asks for it, with a last evaluation."""
    callback = "tests.support.from_python.StopsAtOnce"
    with started(tmp_path, *SMALL, "eval.samples=2", f"trainer.callbacks=[{callback}]") as run:
        run.ended()
    rows = run.metrics()
    assert [row["step"] for row in rows] == [0, 1]
    assert rows[1]["eval/accuracy"] <= rows[1]["eval/accuracy_best_of_2"]
    assert (tmp_path / "final" / "config.json").exists()
    assert [path.name for path in (tmp_path / "checkpoints").glob("step_*")] == ["step_00000001"]


@pytest.mark.slow
def test_the_example_of_an_own_task_is_judged_by_its_own_reward(tmp_path):
    small = [*SMALL[3:], f"hydra.run.dir={tmp_path}", "trainer.samples_every_steps=1"]
    with launched(tmp_path, "own_task", *small, env=PATH) as run:
        output = run.ended()
    assert "own_task.jsonl: 490 training" in output
    assert f"mean reward {run.metrics()[-1]['reward/mean']:.3f}" in output
    assert 0.0 < run.metrics()[1]["reward/mean"] < 1.0


@pytest.mark.slow
def test_the_example_of_a_callback_stops_the_run(tmp_path):
    (tmp_path / "mine.py").write_text("import train\nclass Soon(train.GoodEnough): pass\n")
    more = ["trainer.callbacks=[mine.Soon]", "eval.every_steps=1", f"hydra.run.dir={tmp_path}"]
    with launched(tmp_path, "train", *SMALL[1:], *more, env=PATH) as run:
        output = run.ended()
    # Both callbacks print: the one from Python and that of the config.
    assert output.count("step 1: mean reward ") == 2
    assert re.search(r"\naccuracy 0\.\d+ after [12] steps, in ", output)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_example_of_a_reshard_generates_what_transformers_does(tmp_path, ranks):
    program = str(ROOT / "examples" / "reshard.py")
    module, *arguments = (
        ["reshard"]
        if ranks == 1
        else [*("torch.distributed.run", f"--nproc-per-node={ranks}", program)]
    )
    with launched(tmp_path, module, *arguments, env=PATH) as run:
        output = run.output()
        assert run.process.returncode == 0, output
    (tokens,) = re.findall(r"vLLM as transformers: (\[.*\])", output)
    assert len(ast.literal_eval(tokens)) > 1
    (moved,) = re.findall(r"moved and verified: (\{.*\})", output)
    metrics = ast.literal_eval(moved)
    assert metrics["written_bytes"] > 0 and (metrics["received_bytes"] > 0) == (ranks == 2)
