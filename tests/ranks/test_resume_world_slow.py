"""A run goes on with other numbers of workers and other engines: same state, same losses."""

from pathlib import Path

import pytest

from hybridrl.checkpoint.files import STATE, checkpoints_folder, step_name
from hybridrl.checkpoint.verification import newest_good
from hybridrl.trainer.tracking.tracker import read_metrics
from tests.support.kill_and_resume import (
    assert_same_bits,
    finished,
    steps_logged,
    wait_until,
)
from tests.support.runs import SMALL, started
from tests.support.whole_weights import read_whole

pytestmark = pytest.mark.slow

# Of the run that is gone on from; and after which step.
STEPS, TAKEN = 3, 2
PLAIN = [
    *SMALL,
    "trainer.save_final_model=false",
    "algorithm.kl.target=6",
    "checkpoint.every_steps=1",
    "checkpoint.keep_last=0",
]
# Steps in which the critic alone learns leave the actor as it was loaded, to be saved again.
ACTOR_RESTS = [
    "trainer.total_steps=100",
    "trainer.critic_warmup_steps=99",
    "checkpoint.allow_config_changes=true",
]
LAYOUTS = {
    "two workers": ["cluster.gpus_per_node=2"],
    "one worker": [],
    "engine of two workers": ["cluster.gpus_per_node=2", "rollout.tensor_parallel_size=2"],
    "eight workers": ["cluster.gpus_per_node=8", "rollout.tensor_parallel_size=2"],
    "four workers": ["cluster.gpus_per_node=4"],
}
LOSSES = ("actor/loss", "critic/loss", "actor/grad_norm", "critic/grad_norm", "actor/kl")


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> Path:
    """The directory of a run on four workers."""
    run_dir = tmp_path_factory.mktemp("four") / "run"
    finished(run_dir, *PLAIN, f"trainer.total_steps={STEPS}", *LAYOUTS["four workers"])
    return run_dir


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_next_steps_losses_are_those_of_the_run_on_four_workers(four, tmp_path, layout):
    source = checkpoints_folder(four) / step_name(TAKEN)
    resume = [f"resume={source}", f"trainer.total_steps={STEPS}"]
    finished(tmp_path, *PLAIN, *resume, *LAYOUTS[layout])
    found, wanted = rows(tmp_path)[STEPS], rows(four)[STEPS]
    assert found["batch/tokens"] == wanted["batch/tokens"]
    for name in LOSSES:
        assert found[name] == pytest.approx(wanted[name], rel=0, abs=1e-5), name


def test_the_actors_state_keeps_its_bits_through_4_2_1_2_8_and_4_workers(four, tmp_path):
    wanted, source = actor_state(four), four
    for layout, overrides in LAYOUTS.items():
        run_dir = tmp_path / layout.replace(" ", "_")
        leave_after_a_step(run_dir, f"resume={source}", *overrides)
        assert newest_good(run_dir).manifest.step > newest_good(source).manifest.step
        assert_same_bits(actor_state(run_dir), wanted)
        source = run_dir


def leave_after_a_step(run_dir: Path, *overrides: str) -> None:
    """Go on for at least a step, until SIGTERM has the run leave with a checkpoint."""
    with started(run_dir, *PLAIN, *ACTOR_RESTS, *overrides) as run:
        wait_until(lambda: steps_logged(run_dir), "what was known", run)
        known = steps_logged(run_dir)
        wait_until(lambda: steps_logged(run_dir) > known, "a step", run)
        run.process.terminate()
        output = run.output()
        assert run.process.returncode == 75, output


def actor_state(run_dir: Path) -> dict:
    """The actor's weights and moments in the newest checkpoint."""
    state = read_whole(newest_good(run_dir).folder / STATE, "actor.")
    assert any(key.startswith("optim.exp_avg") for key in state)
    return state


def rows(run_dir: Path) -> list[dict]:
    """The metrics of a run that has ended."""
    return read_metrics(run_dir / "metrics.jsonl")
