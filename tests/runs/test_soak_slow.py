"""Two hundred steps: memory that stays flat, and nine kills that change nothing."""

import math
import os
import re
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from tests.support.kill_and_resume import (
    EVERYTHING,
    LOOK_S,
    WORKER,
    assert_same_end,
    is_alive,
    steps_logged,
    wait_until,
)
from tests.support.runs import Run, started

pytestmark = pytest.mark.slow

STEPS, EVERY = 200, 20
# Steps after which memory is looked at, and MB a step by which it may grow after them.
FIRST, SLOPE = 10, 0.05
LONG = [
    *EVERYTHING,
    f"trainer.total_steps={STEPS}",
    "data.prompts_per_step=4",
    "eval.every_steps=10",
    "checkpoint.every_steps=5",
]


class Memory:
    """Memory of a run's processes by step, in MB.

    Anonymous and shared memory, in RAM or swapped: pages of files come and go as the kernel likes.

    Attributes:
        used: by process: pairs of step and MB.
        titles: what each is.
    """

    def __init__(self) -> None:
        self.used: dict[int, list[tuple[int, float]]] = defaultdict(list)
        self.titles: dict[int, str] = {}

    def sample(self, run: Run, step: int) -> None:
        """Look at all processes of a run."""
        for pid, title in run.processes().items():
            with suppress(FileNotFoundError, ProcessLookupError):
                status = Path(f"/proc/{pid}/status").read_text()
                kib = re.findall(r"(?:RssAnon|RssShmem|VmSwap):\s+(\d+) kB", status)
                if kib:  # else it has just ended
                    self.used[pid].append((step, sum(map(int, kib)) * 1024 / 1e6))
                    self.titles[pid] = " ".join(title.split())[:70]

    def slopes(self) -> dict[str, float]:
        """MB a step of each process that lived all the time, by its title: of a linear fit."""
        return {
            f"{self.titles[pid]} ({pid})": float(np.polyfit(*np.array(samples).T, 1)[0])
            for pid, samples in self.used.items()
            if len(samples) > 0.8 * (STEPS - FIRST)
        }


def followed(run: Run, each_step: Callable[[int], None]) -> str:
    """Do something once after each step that is seen; what the run printed."""
    printed: list[str] = []
    reader = Thread(target=lambda: printed.append(run.process.stdout.read()), daemon=True)
    reader.start()
    seen = 0
    while run.process.poll() is None:
        step = steps_logged(run.run_dir) - 1
        if step > seen:
            seen = step
            each_step(step)
        time.sleep(LOOK_S)
    reader.join(30)
    return "".join(printed)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> tuple[Path, Memory]:
    """The run that nobody disturbs, and its memory."""
    run_dir, memory = tmp_path_factory.mktemp("soak") / "run", Memory()
    with started(run_dir, *LONG) as run:
        output = followed(run, lambda step: memory.sample(run, step) if step > FIRST else None)
        assert run.process.returncode == 0, output[-5000:]
    return run_dir, memory


def test_memory_of_every_process_is_flat(undisturbed):
    slopes = undisturbed[1].slopes()
    for title, slope in slopes.items():
        print(f"{slope:8.4f} MB a step  {title}")
    assert sum(WORKER in title for title in slopes) == 1, slopes
    assert sum("hybridrl.main" in title for title in slopes) >= 1, slopes
    assert len(slopes) > 6
    assert all(math.isfinite(slope) and slope < SLOPE for slope in slopes.values()), slopes


def test_a_kill_every_twenty_steps_changes_nothing(undisturbed, tmp_path):
    """A worker's death is for the run itself to mend, the driver's for whoever starts it again."""
    overrides = [*LONG, f"trainer.max_restarts={STEPS}"]
    for step in range(EVERY, STEPS, 2 * EVERY):
        with started(tmp_path, *overrides) as run:
            reader = Thread(target=run.process.stdout.read, daemon=True)
            reader.start()
            kill(run, step, worker=True)
            if step + EVERY < STEPS:
                kill(run, step + EVERY, worker=False)
            code = run.process.wait(600)
            assert code == (-signal.SIGKILL if step + EVERY < STEPS else 0)
    log = (tmp_path / "main.log").read_text()
    assert len(re.findall(r"The run starts anew from step [1-9]\d*: ", log)) == STEPS // EVERY // 2
    assert_same_end(tmp_path, undisturbed[0])


def kill(run: Run, step: int, *, worker: bool) -> None:
    """Kill a run's worker or driver after a step."""
    wait_until(lambda: steps_logged(run.run_dir) > step, f"step {step}", run, 600)
    (hosted,) = [pid for pid, title in run.processes().items() if WORKER in title]
    victim = hosted if worker else run.process.pid
    assert is_alive(victim)
    os.kill(victim, signal.SIGKILL)
