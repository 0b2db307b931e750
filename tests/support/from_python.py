"""Programs that train from Python: python -m tests.support.from_python <name> <folder>."""

import json
import logging
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import ray

import hybridrl
from tests.support.runs import SMALL

LOOKED_AT = ("reward/mean", "actor/loss", "actor/grad_norm", "eval/accuracy", "actor/ratio_max")


class Calls(hybridrl.Callback):
    """Keeps what it was told, and stops the run at a step."""

    def __init__(self, last: int | None = None) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.last = last

    def on_samples(self, trainer, step, samples):
        self.told.append(("samples", step, len(samples), sum(s.score for s in samples)))

    def on_evaluation(self, trainer, step, metrics):
        self.told.append(("evaluation", step, metrics["eval/accuracy"]))
        if step == self.last:
            trainer.stop()

    def on_step_end(self, trainer, step, metrics):
        assert len(trainer.batch) == len(trainer.samples)
        self.told.append(("step", step, metrics["reward/mean"]))


class StopsAtOnce(Calls):
    """As from the command line: made without arguments."""

    def on_samples(self, trainer, step, samples):
        trainer.stop()


class Fails(hybridrl.Callback):
    """Has a mistake."""

    def on_step_end(self, trainer, step, metrics):
        raise ValueError(f"a mistake at step {step}")


def state() -> tuple[Any, ...]:
    """What a run must leave as it was."""
    return (
        (sys.stdout, sys.stderr),
        logging.getLogger().handlers[:],
        [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
        ray.is_initialized(),
    )


def twice(folder: Path) -> None:
    """A whole run, then the same by hand in a thread: the same numbers, and nothing is left."""
    before, calls, by_hand = state(), Calls(), []
    small = [*SMALL, "tracking.report=true"]
    result = hybridrl.train(small, [calls], folder=folder / "whole")

    def steps() -> None:
        with hybridrl.Trainer(small, folder=folder / "by_hand") as trainer:
            by_hand.append({"eval/accuracy": trainer.evaluate()["eval/accuracy"]})
            by_hand.extend(trainer.step() for _ in range(2))
            assert trainer.evaluate()["eval/accuracy"] == by_hand[-1]["eval/accuracy"]
            assert trainer.fit().step == 2  # nothing is left to do

    thread = threading.Thread(target=steps)
    thread.start()
    thread.join()
    assert state() == before
    assert len([*folder.glob("*/report.html")]) == 2
    rows = [json.loads(line) for line in (folder / "whole" / "metrics.jsonl").open()]
    numbers = [[[row.get(name) for name in LOOKED_AT] for row in run] for run in (rows, by_hand)]
    numbers[0][0] = [None, None, None, rows[0]["eval/accuracy"], None]
    assert numbers[0] == numbers[1]
    assert (result.step, result.metrics["step"]) == (2, 2)
    assert result.accuracy == rows[-1]["eval/accuracy"]
    assert [call[:2] for call in calls.told] == [
        *(("evaluation", 0), ("samples", 1), ("step", 1)),
        *(("samples", 2), ("evaluation", 2), ("step", 2)),
    ]
    assert calls.told[1] == ("samples", 1, 32, 32 * rows[1]["reward/mean"])


def failing(folder: Path) -> None:
    """A callback with a mistake, then one that stops: the process goes on after both."""
    before = state()
    long = [*SMALL, "trainer.total_steps=500", "trainer.save_final_model=false"]
    try:
        hybridrl.train([*long, "checkpoint.every_steps=1"], [Fails()], folder=folder / "failed")
    except hybridrl.RunStopped as error:
        assert "Fails.on_step_end failed" in str(error) and "a mistake at step 1" in str(error)
    else:
        raise AssertionError("it went on")
    ended = json.loads((folder / "failed" / "result.json").read_text())
    assert ended["status"] == "failed"
    assert (folder / "failed" / "checkpoints" / "step_00000001").is_dir()
    result = hybridrl.train([*long, "eval.every_steps=1"], [Calls(1)], folder=folder / "stopped")
    assert result.step == 1 and result.accuracy == result.metrics["eval/accuracy"]
    assert state() == before


def interrupted(folder: Path) -> None:
    """Steps until somebody sends SIGINT."""
    with hybridrl.Trainer([*SMALL, "trainer.total_steps=500"], folder=folder) as trainer:
        while True:
            trainer.step()


def forgotten(folder: Path) -> None:
    """A trainer that nobody closes, as in a notebook whose kernel ends."""
    trainer = hybridrl.Trainer(SMALL, folder=folder)
    print("reward", trainer.step()["reward/mean"])


if __name__ == "__main__":
    {"twice": twice, "failing": failing, "interrupted": interrupted, "forgotten": forgotten}[
        sys.argv[1]
    ](Path(sys.argv[2]))
