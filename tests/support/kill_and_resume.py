"""Kills runs at drawn instants, resumes them, and compares what two runs end with, bit for bit."""

import contextlib
import os
import random
import re
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from hybridrl.checkpoint.files import DRIVER, STATE, checkpoints_folder, steps_in
from hybridrl.checkpoint.verification import newest_good
from tests.support.runs import SMALL, Run, started
from tests.support.whole_weights import read_whole

# Metrics that a clock decides: seconds, shares of them, what is divided by them, and which engine
# took longest. No other metric may differ between two runs of one command.
TIMED = re.compile(
    r"(time|idle|setup|mfu|tokens_per_s)/.+|.*(_s|/seconds|_per_second(_\w+)?)|.*/slowest_engine|"
    r"health/slow_\w+"
)
WORKER = "WorkerHost"
# Seconds between two looks at a run's files, and the longest that a test waits before it gives up:
# a machine that does other things takes minutes for a few steps.
LOOK_S, LONGEST_S = 0.005, 300.0
# Seconds after a kill in which the run is gone, with all that it has started and left.
GONE_S = 60.0


# Variables beside those of this process.
Env = dict[str, str] | None

STEPS = 10
# All that a run can remember: a critic, which warms up first, a KL coefficient that moves, learning
# rates that fall.
EVERYTHING = [
    *SMALL,
    f"trainer.total_steps={STEPS}",
    "trainer.critic_warmup_steps=2",
    "trainer.save_final_model=false",
    "algorithm.kl.target=6",
    "actor.optim.schedule=cosine",
    "critic.optim.schedule=cosine",
    "eval.every_steps=3",  # vLLM holds the weights of some checkpoints, of others older ones
    "trainer.samples_every_steps=3",
    "data.num_eval_problems=8",
    "checkpoint.every_steps=2",
    "resume=auto",
]


@dataclass
class Timeline:
    """When a run did what, by the clock of who watched it.

    Attributes:
        logged: of each step, when its metrics were on disk.
        committed: of each checkpoint, when it had its name.
        saving: instants at which a checkpoint was being written.
    """

    logged: dict[int, float] = field(default_factory=dict)
    committed: dict[int, float] = field(default_factory=dict)
    saving: list[float] = field(default_factory=list)

    def is_saving(self, instant: float) -> bool:
        """Whether a checkpoint was being written at an instant."""
        return any(abs(instant - other) <= 2 * LOOK_S for other in self.saving)


@dataclass(frozen=True)
class Kill:
    """Whom to kill, and when.

    Attributes:
        victim: driver or worker.
        step: the last one whose metrics are on disk then.
        share: of the time from there to the next thing that the undisturbed run did.
        seconds: how long that took it.
        saving: whether it was writing a checkpoint at that instant.
    """

    victim: str
    step: int
    share: float
    seconds: float
    saving: bool


def watch(run: Run) -> Timeline:
    """Look at a run's files until it ends."""
    seen = Timeline()
    folder = checkpoints_folder(run.run_dir)
    while run.process.poll() is None:
        now = time.monotonic()
        for step in range(len(seen.logged), steps_logged(run.run_dir)):
            seen.logged[step] = now
        for step in steps_in(folder):
            seen.committed.setdefault(step, now)
        if next(folder.glob(".*.partial"), None) is not None:
            seen.saving.append(now)
        time.sleep(LOOK_S)
    return seen


def undisturbed(run_dir: Path, *overrides: str, env: Env = None) -> Timeline:
    """A run that nobody disturbs, watched."""
    with started(run_dir, *overrides, env=env) as run:
        timeline = watch(run)
        output = run.output()
        assert run.process.returncode == 0, output
        assert len(timeline.logged) == STEPS + 1, output
    return timeline


def steps_logged(run_dir: Path) -> int:
    """Whole lines of metrics.jsonl."""
    with contextlib.suppress(FileNotFoundError):
        return (run_dir / "metrics.jsonl").read_bytes().count(b"\n")
    return 0


def draw_kill(timeline: Timeline, seed: int) -> Kill:
    """An instant, uniform between the first checkpoint and the last step; of odd seeds a worker's.

    In the last step itself, a run that is faster than the undisturbed one may be ending already.
    """
    first, (*_, last, _) = next(iter(timeline.committed.values())), timeline.logged.values()
    instant = random.Random(seed).uniform(first, last)
    step = max(step for step, at in timeline.logged.items() if at <= instant)
    begin, end = timeline.logged[step], timeline.logged[step + 1]
    share, saving = (instant - begin) / (end - begin), timeline.is_saving(instant)
    return Kill(("driver", "worker")[seed % 2], step, share, end - begin, saving)


def kill(run: Run, plan: Kill) -> None:
    """Wait for the instant and send SIGKILL to a process that is alive, of a run that goes on."""
    wait_until(lambda: steps_logged(run.run_dir) > plan.step, f"step {plan.step}", run)
    seen = time.monotonic()
    workers = [pid for pid, title in run.processes().items() if WORKER in title]
    pid = run.process.pid if plan.victim == "driver" else random.Random(plan.share).choice(workers)
    time.sleep(max(0.0, plan.share * plan.seconds - (time.monotonic() - seen)))
    assert is_alive(pid) and is_alive(run.process.pid), f"{plan}: the run had ended"
    os.kill(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def wait_until(is_so: Callable[[], bool], what: str, run: Run, seconds: float = LONGEST_S) -> None:
    """Wait for something, but not for long, nor longer than the run lives."""
    end = time.monotonic() + seconds
    while not is_so():
        assert run.process.poll() is None, f"ended before {what}: {run.output()}"
        assert time.monotonic() < end, f"{what} did not come"
        time.sleep(LOOK_S)


def killed(run_dir: Path, plan: Kill, *overrides: str, env: Env = None) -> None:
    """Start a run and kill it; all that it started ends, and nothing of it is left."""
    with started(run_dir, *overrides, env=env) as run:
        kill(run, plan)
        since = time.monotonic()
        if plan.victim == "driver":
            assert run.process.wait() == -signal.SIGKILL
        else:
            output = run.output(timeout=GONE_S)
            assert run.process.returncode == 1, output
            assert "its process died" in output
        while run.processes():
            assert time.monotonic() < since + GONE_S, run.processes()
            time.sleep(LOOK_S)
        run.assert_nothing_left()


def finished(run_dir: Path, *overrides: str, env: Env = None) -> str:
    """Run to the end; what was printed."""
    with started(run_dir, *overrides, env=env) as run:
        return run.ended()


def resumed(run_dir: Path, *overrides: str) -> None:
    """Run to the end; it must have gone on from the newest whole checkpoint that is there."""
    found = newest_good(run_dir)
    assert found is not None, "killed before the first checkpoint"
    output = " ".join(finished(run_dir, *overrides).split())
    assert f"{found.folder.name}: step {found.manifest.step}, of" in output, output


def assert_same_end(run_dir: Path, reference: Path, after: int = 0) -> None:
    """Final checkpoint, metrics and rollouts of two runs are equal, times and rates left out.

    Args:
        run_dir: of the one.
        reference: of the other.
        after: the step of another run from which the one went on in a directory of its own. Metrics
            up to it are taken over, rollouts are not.
    """
    one, other = newest_good(run_dir), newest_good(reference)
    assert one is not None and other is not None
    assert one.folder.name == other.folder.name
    assert (one.folder / DRIVER).read_bytes() == (other.folder / DRIVER).read_bytes()
    assert_same_bits(read_whole(one.folder / STATE, ""), read_whole(other.folder / STATE, ""))
    assert untimed(one.manifest.metrics) == untimed(other.manifest.metrics)
    assert untimed_rows(run_dir) == untimed_rows(reference)
    assert kept("rollouts", run_dir) == kept("rollouts", reference, after) != {}
    tokens = kept("tokens", run_dir)  # none with tracking.token_samples=0
    assert tokens in ({}, kept("tokens", reference, after))
    shown = untimed(scalars(run_dir))
    assert shown["reward/mean"] and shown == untimed(scalars(reference))


def assert_same_bits(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """The same tensors: names, shapes, dtypes and bits."""
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert (found[key].shape, found[key].dtype) == (tensor.shape, tensor.dtype), key
        assert torch.equal(bits(found[key]), bits(tensor)), key


def bits(tensor: Tensor) -> Tensor:
    """A tensor's bytes, for NaN equals no NaN and 0 equals -0."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def untimed(metrics: Mapping[str, object]) -> dict[str, object]:
    """What no clock decides."""
    return {name: value for name, value in metrics.items() if not TIMED.fullmatch(name)}


def untimed_rows(run_dir: Path) -> list[str]:
    """The rows of metrics.jsonl as they print, which is exact, without times and rates."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    rows = [re.findall(r'"([^"]+)": ([^,}]+)', line) for line in lines]
    return [str(sorted(untimed(dict(row)).items())) for row in rows]


def kept(folder: str, run_dir: Path, after: int = 0) -> dict[str, bytes]:
    """The files of the steps after one in a folder of records."""
    files = (run_dir / folder).glob("*step_*")
    later = [path for path in files if int(path.stem.rpartition("_")[2]) >= (after and after + 1)]
    return {path.name: path.read_bytes() for path in later}


def scalars(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows: of each tag the steps, in order, with their values."""
    shown = EventAccumulator(str(run_dir / "tensorboard"), {"scalars": 0})
    shown.Reload()
    return {
        tag: [(event.step, event.value) for event in shown.Scalars(tag)]
        for tag in shown.Tags()["scalars"]
    }
