"""Processes of every kind killed and stopped in every phase: the run names them, goes on or ends.

Forty faults and five more. A run that restarts meets several, one after the other. That a run goes
on without a worker's process, and that a killed driver leaves nothing, test_resume.py shows in
`make test`, too.
"""

import os
import signal
import time
from signal import SIGKILL, SIGSTOP

import pytest

from hybridrl.checkpoint.files import checkpoints_folder, steps_in
from hybridrl.checkpoint.verification import newest_good
from tests.support.faults import (
    RANKS,
    STALL_S,
    TOLD_S,
    Fault,
    Faulty,
    Phase,
    Victim,
    faulty,
    told,
)
from tests.support.sockets import assert_this_machine_alone_reaches

rank0, rank1, reward = Victim.rank0, Victim.rank1, Victim.reward
driver, raylet, gcs = Victim.driver, Victim.raylet, Victim.gcs
start, build, evaluate, reshard = Phase.start, Phase.build, Phase.evaluate, Phase.reshard
rollout, score, update, save = Phase.rollout, Phase.score, Phase.update, Phase.save

IN_SHORT = [
    Fault(rank1, SIGKILL, start),
    Fault(rank0, SIGKILL, save),
    Fault(gcs, SIGKILL, rollout),
]
RANK_0_KILLED = [
    Fault(rank0, SIGKILL, phase) for phase in (evaluate, reshard, rollout, score, update)
]
RANK_1_KILLED = [
    Fault(rank1, SIGKILL, phase) for phase in (evaluate, reshard, rollout, score, update, save)
]
RANK_0_STOPPED = [
    Fault(rank0, SIGSTOP, phase) for phase in (evaluate, reshard, rollout, score, update, save)
]
RANK_1_STOPPED = [Fault(rank1, SIGSTOP, phase) for phase in (reshard, rollout, score, update, save)]
RAY = [
    Fault(raylet, SIGKILL, start),
    Fault(gcs, SIGSTOP, rollout),
    Fault(raylet, SIGSTOP, score),
    Fault(gcs, SIGKILL, update),
    Fault(raylet, SIGKILL, save),
]
# The run goes on without a restart.
HARMLESS = [
    Fault(reward, SIGKILL, score),
    Fault(reward, SIGSTOP, score),
    Fault(reward, SIGKILL, update),
    Fault(reward, SIGSTOP, update),
    Fault(driver, SIGSTOP, rollout),
    Fault(driver, SIGSTOP, update),
]
DRIVER_KILLED = [Fault(driver, SIGKILL, phase) for phase in (start, rollout, update, save)]
# Rank 0 trains, rank 1 samples.
SPLIT = [
    "rollout.schedule=split",
    "placement.rollout_gpus=1",
    "actor.epochs=4",  # so that responses are in flight during the update
]
BESIDE_TRAINING = [
    Fault(rank1, SIGKILL, Phase.ahead),
    Fault(rank0, SIGKILL, update),
    Fault(rank1, SIGSTOP, Phase.ahead),
    Fault(rank0, SIGSTOP, update),
    Fault(rank0, SIGKILL, Phase.send),
]
# Beyond the forty. Ray may end the driver with the raylet that it hands a batch to.
IN_SETUP = [Fault(rank1, SIGSTOP, start), Fault(rank0, SIGKILL, build)]
RAYLET_KILLED = [Fault(raylet, SIGKILL, phase) for phase in (rollout, score, update)]
# A run needs Ray's GCS for nothing but its start and end: steps until it is missed, at most.
STEPS_WITHOUT_GCS = 4 * STALL_S
# From which fault of a run on there is a checkpoint to go on from.
SAVED_BEFORE = 3
# Seconds for which the driver is stopped, and those that what it leaves behind may live.
STOPPED_S, ORPHANS_S = 2.0, 15.0


def test_there_are_forty_different_faults():
    chains = (RANK_0_KILLED, RANK_1_KILLED, RANK_0_STOPPED, RANK_1_STOPPED, RAY)
    everything = {*IN_SHORT, *HARMLESS, *DRIVER_KILLED}.union(*chains)
    assert len(everything) == 40


@pytest.mark.slow
@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(IN_SHORT, id="in short"),
        pytest.param(RANK_1_KILLED, id="rank 1 killed"),
        pytest.param(RANK_1_STOPPED, id="rank 1 stopped"),
        pytest.param(RAY, id="Ray"),
        pytest.param(IN_SETUP, id="in the setup"),
    ],
)
def test_a_run_with_restarts_goes_on_after_each_fault_to_its_end(tmp_path, faults):
    stopped = [fault for fault in faults if fault.victim is gcs and fault.signum == SIGSTOP]
    last = len(faults) + 4 + STEPS_WITHOUT_GCS * len(stopped)
    overrides = [f"trainer.total_steps={last}", f"trainer.max_restarts={len(faults)}"]
    with faulty(tmp_path / "run", *overrides) as run:
        earlier = set()
        killed_ranks = []
        for number, fault in enumerate(faults, 1):
            if number == SAVED_BEFORE:
                await_checkpoint(run)
            since, pid = hit_and_hear(run, fault, earlier)
            earlier |= run.present
            if fault.victim in RANKS and fault.signum == SIGKILL:
                killed_ranks.append(pid)
            where = "step [0-9]+" if number >= SAVED_BEFORE else ".*"
            await_restart(run, since, f"from {where}: restart {number} of {len(faults)}")
        run.reader.join(120.0)
        assert run.run.process.wait() == 0, run.text
        assert run.steps() == list(range(last + 1))
        for pid in killed_ranks:
            told_of = [line for _, line in run.lines if f"pid {pid} failed in" in line]
            assert len(told_of) == 1, told_of
        kept = [path.name for path in (tmp_path / "run" / "logs").glob("*_rank0.*log")]
        after_start = [fault for fault in faults if fault.phase is not start]
        assert len(kept) == len(after_start) + 1, kept
        run.run.assert_nothing_left()
        assert_this_machine_alone_reaches(run.run.listeners)
        ranks = {place.pid for place in run.run.listeners if "WorkerHost" in place.command}
        assert len(ranks) >= 2 * len(after_start), run.run.listeners


@pytest.mark.slow
@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(RANK_0_KILLED, id="rank 0 killed"),
        pytest.param(RANK_0_STOPPED, id="rank 0 stopped"),
    ],
)
def test_a_run_whose_restarts_are_used_up_ends_with_the_last_error(tmp_path, faults):
    limit = f"trainer.max_restarts={len(faults) - 1}"
    with faulty(tmp_path / "run", "trainer.total_steps=500", limit) as run:
        earlier = set()
        for number, fault in enumerate(faults, 1):
            since, _ = hit_and_hear(run, fault, earlier)
            earlier |= run.present
            if number < len(faults):
                await_restart(run, since, f"restart {number} of {len(faults) - 1}")
        run.reader.join(60.0)
        assert run.run.process.wait() == 1, run.text
        assert time.monotonic() - since < TOLD_S + STALL_S
        run.run.assert_nothing_left()


@pytest.mark.slow
def test_a_rank_that_trains_or_samples_fails_while_the_other_works(tmp_path):
    """Each is named and costs a restart; SIGTERM with responses in flight saves."""
    faults = BESIDE_TRAINING
    overrides = [*SPLIT, "trainer.total_steps=500", f"trainer.max_restarts={len(faults)}"]
    with faulty(tmp_path / "run", *overrides) as run:
        earlier: set[int] = set()
        for number, fault in enumerate(faults, 1):
            if number == SAVED_BEFORE:
                await_checkpoint(run)
            since, _ = hit_and_hear(run, fault, earlier)
            earlier |= run.present
            await_restart(run, since, f"restart {number} of {len(faults)}")
        run.hit(Fault(driver, signal.SIGTERM, update), set())  # the driver is that of all starts
        run.reader.join(40.0)
        assert run.run.process.wait() == 75, run.text
        assert newest_good(tmp_path / "run").manifest.step == run.steps()[-1]
        run.run.assert_nothing_left()


@pytest.mark.slow
def test_what_is_no_worker_may_fall_out_and_sigterm_to_the_group_saves(tmp_path):
    """Reward processes are replaced, a stopped driver goes on; then the run is preempted."""
    with faulty(tmp_path / "run", "trainer.total_steps=500") as run:
        for fault in HARMLESS:
            pid = run.hit(fault, set())
            if fault.victim is driver:
                time.sleep(STOPPED_S)
                os.kill(pid, signal.SIGCONT)
            await_steps(run, 2)
            if fault.victim is reward:
                await_replacement(run, pid)
        failed = [row["reward/failed"] for row in run.run.metrics()[1:]]
        # A process has one response at a time, and none outside the scoring.
        assert 1 <= sum(failed) <= sum(fault.victim is reward for fault in HARMLESS), failed
        os.killpg(run.run.process.pid, signal.SIGTERM)
        run.reader.join(40.0)
        assert run.run.process.wait() == 75, run.text
        assert "; resume from " in run.text
        assert newest_good(tmp_path / "run").manifest.step == run.steps()[-1]
        run.run.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize("fault", [pytest.param(f, id=f.phase.name) for f in DRIVER_KILLED])
def test_a_killed_driver_leaves_nothing(tmp_path, fault):
    """One engine on both ranks, which has files in shared memory."""
    overrides = ["trainer.total_steps=500", "rollout.tensor_parallel_size=2"]
    with faulty(tmp_path / "run", *overrides) as run:
        pid = run.hit(fault, set())
        assert run.run.process.wait() == -SIGKILL
        await_end_of_orphans(run)
        run.run.assert_nothing_left()
        assert f"The run's process (pid {pid}) was killed" in run.text


@pytest.mark.slow
@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.phase) for fault in RAYLET_KILLED])
def test_a_raylet_killed_beside_calls_costs_a_restart_or_the_driver(tmp_path, fault, capsys):
    """Either the run starts anew and comes to its end, or the driver goes; nothing is left."""
    last = 6
    overrides = [f"trainer.total_steps={last}", "trainer.max_restarts=1"]
    with faulty(tmp_path / "run", *overrides) as run:
        pid = run.hit(fault, set())
        since = time.monotonic()
        while "starts anew" not in run.text and run.run.process.poll() is None:
            assert time.monotonic() < since + TOLD_S, run.text
            time.sleep(0.1)
        if has_restarted := "starts anew" in run.text:
            run.await_end_of_known()
        code = run.run.process.wait(120.0)
        await_end_of_orphans(run)
        run.run.assert_nothing_left()
        if has_restarted:
            assert code == 0 and run.steps() == list(range(last + 1)), run.text
            assert f"Ray's raylet (pid {pid}) on this machine died" in run.text
        else:
            assert code not in (0, 2, 75), run.text
            assert f"The run's process (pid {run.run.process.pid}) was killed" in run.text
        with capsys.disabled():
            outcome = "a restart" if has_restarted else f"the driver ended with code {code}"
            print(f"\n{fault}: {outcome}")


def await_restart(run: Faulty, since: float, which: str) -> None:
    """Wait until the run starts anew, and see that nothing of the start before is left."""
    run.await_line(f"starts anew .*{which}", since, 90.0)
    run.await_end_of_known()


def hit_and_hear(run: Faulty, fault: Fault, earlier: set[int]) -> tuple[float, int]:
    """Hit a process and wait until the run has named it; the instant of the signal, and the pid."""
    pid = run.hit(fault, earlier)
    since = time.monotonic()
    for pattern in told(fault, pid):
        run.await_line(pattern, since, TOLD_S + STALL_S * (fault.signum == SIGSTOP))
    return since, pid


def await_checkpoint(run: Faulty) -> None:
    """Wait until a checkpoint is there."""
    folder = checkpoints_folder(run.run.run_dir)
    deadline = time.monotonic() + TOLD_S
    while not steps_in(folder):
        assert time.monotonic() < deadline and run.reader.is_alive(), run.text
        time.sleep(0.1)


def await_end_of_orphans(run: Faulty) -> None:
    """Give what outlives the driver the time that it may take to end."""
    deadline = time.monotonic() + ORPHANS_S
    while run.run.processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    run.reader.join(1.0)


def await_replacement(run: Faulty, pid: int) -> None:
    """Wait until a reward process is gone: one that stands still is missed when it has work."""
    deadline = time.monotonic() + TOLD_S
    while pid in run.pids(reward):
        assert time.monotonic() < deadline and run.reader.is_alive(), run.text
        time.sleep(0.1)


def await_steps(run: Faulty, number: int) -> None:
    """Wait until so many more steps are done."""
    wanted = run.steps()[-1] + number
    deadline = time.monotonic() + TOLD_S
    while run.steps()[-1] < wanted:
        assert time.monotonic() < deadline and run.reader.is_alive(), run.text
        time.sleep(0.1)
