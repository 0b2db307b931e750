"""Ctrl-C and SIGTERM: the run ends in time, keeps its metrics, leaves nothing."""

import os
import re
import signal
import time

import pytest

from hybridrl.checkpoint.verification import newest_good
from tests.support.faults import Fault, Phase, Victim, faulty
from tests.support.kill_and_resume import assert_same_end
from tests.support.runs import SMALL, started
from tests.support.terminals import terminal

LONG = [*SMALL, "trainer.total_steps=500", "trainer.save_final_model=false"]
STOP = signal.SIGSTOP
SYNC, PARTIAL = "rollout.schedule=sync", "rollout.schedule=partial"


def test_ctrl_c_ends_the_run_within_15_seconds(tmp_path):
    """A terminal sends it to the whole group; Ray's processes stay until the run ends them."""
    with started(tmp_path / "run", *LONG, "tracking.report=true") as run:
        run.wait_for('"step": 2')
        os.killpg(run.process.pid, signal.SIGINT)
        start = time.monotonic()
        output = run.output(timeout=30)
        assert time.monotonic() - start < 15
        assert run.process.returncode == 130, output
        assert "Traceback" not in output
        assert len(run.metrics()) >= 3
        assert (tmp_path / "run" / "report.html").is_file()
        run.assert_nothing_left()


@pytest.mark.slow
def test_sigterm_in_the_setup_ends_the_run_at_once(tmp_path):
    with faulty(tmp_path / "run") as run:
        run.hit(Fault(Victim.driver, signal.SIGTERM, Phase.start), set())
        run.reader.join(15.0)
        assert run.run.process.wait() == 143, run.text
        run.run.assert_nothing_left()


@pytest.mark.slow
def test_a_time_too_short_for_a_checkpoint_ends_the_run_without_one(tmp_path):
    overrides = ["trainer.total_steps=500", "checkpoint.on_sigterm=0.05"]
    with faulty(tmp_path / "run", *overrides) as run:
        run.hit(Fault(Victim.driver, signal.SIGTERM, Phase.rollout), set())
        run.reader.join(15.0)
        assert run.run.process.wait() == 143, run.text
        run.run.assert_nothing_left()


@pytest.mark.slow
def test_the_second_sigterm_does_not_wait(tmp_path):
    """A stopped worker keeps the checkpoint from being written."""
    with faulty(tmp_path / "run", "trainer.total_steps=500", "cluster.stall_timeout_s=60") as run:
        run.hit(Fault(Victim.rank1, STOP, Phase.update), set())
        os.kill(run.run.process.pid, signal.SIGTERM)
        time.sleep(2.0)
        assert run.run.process.poll() is None, run.text
        os.kill(run.run.process.pid, signal.SIGTERM)
        run.reader.join(15.0)
        assert run.run.process.wait() == 143, run.text
        run.run.assert_nothing_left()


@pytest.mark.slow
def test_an_error_after_sigterm_is_no_reason_to_start_anew(tmp_path):
    """Whoever preempts a job may send the signal to all of its processes."""
    overrides = ["trainer.total_steps=500", "trainer.max_restarts=3", "cluster.stall_timeout_s=60"]
    with faulty(tmp_path / "run", *overrides) as run:
        worker = run.hit(Fault(Victim.rank1, STOP, Phase.update), set())
        os.kill(run.run.process.pid, signal.SIGTERM)
        time.sleep(1.0)
        os.kill(worker, signal.SIGKILL)
        run.reader.join(30.0)
        assert run.run.process.wait() == 143, run.text
        assert f"pid {worker} failed in" in run.text
        assert "starts anew" not in run.text
        run.run.assert_nothing_left()


@pytest.mark.slow
def test_an_error_that_comes_each_time_uses_up_the_restarts(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "failing.py").write_text(FAILING)
    overrides = ["actor.worker=failing.Failing", "trainer.max_restarts=2"]
    with started(tmp_path / "run", *LONG, *overrides) as run:
        output = run.ended(1)
    assert output.count("starts anew from its beginning: restart ") == 2, output
    # Each time once as what a rank failed with, and as the end of its traceback.
    assert len(re.findall(r"failed in .*: ValueError: each time", output)) == 3, output
    assert output.count("ValueError: each time") == 6, output


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [SYNC, PARTIAL])
def test_a_preempted_run_goes_on_with_the_same_command(tmp_path, schedule):
    """Exit code 75 means that; the metrics are then those of a run of one piece."""
    command = ["trainer.total_steps=6", "trainer.samples_every_steps=3", "resume=auto", schedule]
    report = tmp_path / "run" / "report.html"
    with faulty(tmp_path / "run", *command, "tracking.report=true") as run:
        run.hit(Fault(Victim.driver, signal.SIGTERM, Phase.score), set())
        run.reader.join(60.0)
        assert run.run.process.wait() == 75, run.text
        assert run.steps()[-1] < 6
        found = newest_good(tmp_path / "run")
        assert found is not None
        assert f"Stopped by SIGTERM; resume from {found.folder}\n" in run.text
        assert f"Stopped by SIGTERM; resume from {found.folder}<" in report.read_text()
    with faulty(tmp_path / "run", *command, "tracking.report=true") as run:
        run.reader.join(120.0)
        assert run.run.process.wait() == 0, run.text
        assert "Stopped by SIGTERM" not in report.read_text()
        assert run.steps() == list(range(7))
    with faulty(tmp_path / "whole", *command) as run:
        run.reader.join(120.0)
    assert_same_end(tmp_path / "run", tmp_path / "whole")
    if schedule == PARTIAL:
        last = f"resume={newest_good(tmp_path / 'run').folder}"
        changed = ["trainer.total_steps=7", "checkpoint.allow_config_changes=true", last]
        for other, why in {
            SYNC: "sync drops them",
            "data.system_prompt=Answer.": "the training data changed",
            "rollout.max_response_tokens=24": "rollout.max_response_tokens changed",
        }.items():
            with faulty(tmp_path / why, *changed, PARTIAL, other) as run:
                run.reader.join(60.0)
                assert run.run.process.wait() == 0, run.text
                assert f"prompts in flight are not trained: {why}" in run.text


@pytest.mark.slow
def test_a_terminal_that_closes_ends_the_run_with_a_checkpoint(tmp_path):
    folder = tmp_path / "run"
    with terminal() as window, started(folder, *LONG, **window.options) as run:
        run.wait_for('"step": 1')
        window.hang_up()
        assert run.process.wait(60) == 75
        newest = run.metrics()[-1]["step"]
        found = newest_good(folder)
        assert found is not None and found.manifest.step == newest
        assert not any("Traceback" in log.read_text() for log in folder.rglob("*.log"))
        run.assert_nothing_left()


FAILING = """
from hybridrl.workers.actor import ActorWorker
from hybridrl.workers.base import Dispatch, on_all_ranks


class Failing(ActorWorker):
    @on_all_ranks(Dispatch.SHARD_DP_REDUCED)
    def update(self, batch, step, kl_coef):
        raise ValueError("each time")
"""
