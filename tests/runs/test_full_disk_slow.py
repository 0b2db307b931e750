"""A whole run on a disk that fills up, and with a tracker that is down, trains to its end."""

import errno
import json
import os
import re
import time
from pathlib import Path

import pytest

from tests.support.host_cases import need_mounts
from tests.support.kill_and_resume import scalars
from tests.support.on_own_disk import opened
from tests.support.runs import ROOT, SMALL, Run, launched

pytestmark = pytest.mark.slow

SIZE = 2**22  # bytes
STEPS = 8
FULL_FROM, ROOM_FROM = 2, 6  # steps whose lines have been printed
RUN = [
    *SMALL,
    f"trainer.total_steps={STEPS}",
    "trainer.samples_every_steps=1",
    "trainer.save_final_model=false",
    "checkpoint.every_steps=0",
]
# Stands in for W&B, whose server nothing answers for.
WANDB = """
from urllib.request import urlopen

Settings = dict

def init(**arguments):
    urlopen("http://127.0.0.1:9", timeout=10)
"""


def fill(folder: Path) -> None:
    """Leave no byte of a disk free."""
    with open(folder / "ballast", "ab", buffering=0) as ballast:
        try:
            while True:
                ballast.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC


def followed_to(run: Run, step: int) -> str:
    """What a run prints up to the line of a step."""
    printed = ""
    for line in run.process.stdout:
        printed += line
        if re.match(rf"step +{step}/{STEPS}", line):
            return printed
    raise AssertionError(f"the run ended before step {step}\n{printed}")


def wait_for_tensorboard(run_dir: Path, step: int) -> None:
    """Return when a step is shown: a disk that fills up during the writing costs a traceback."""
    deadline = time.monotonic() + 60.0
    while not any(shown[-1][0] >= step for shown in scalars(run_dir).values()):
        assert time.monotonic() < deadline, f"TensorBoard has no step {step}"
    time.sleep(0.1)  # for its other metrics


def steps_of(run_dir: Path) -> tuple[dict[int, dict], set[int]]:
    """The rows of metrics.jsonl, and the steps with rollouts."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rollouts = run_dir.glob("rollouts/step_*.jsonl")
    return {row["step"]: row for row in rows}, {int(path.stem[5:]) for path in rollouts}


@pytest.mark.parametrize("finds_room", [False, True], ids=["full to the end", "room again"])
def test_a_run_without_room_for_logs_and_metrics_trains_to_its_end(tmp_path, finds_room):
    """What is written in the step after the disk is filled or emptied may find room or none."""
    need_mounts()
    run_dir, modules = tmp_path / "run", tmp_path / "modules"
    modules.mkdir()
    (modules / "wandb.py").write_text(WANDB)
    overrides = [*RUN, *(["tracking.wandb_project=p"] * (not finds_room))]
    command = [str(run_dir), str(SIZE), "hybridrl.main", *overrides, f"hydra.run.dir={run_dir}"]
    environment = {"PYTHONPATH": f"{ROOT}:{modules}"}
    with launched(run_dir, "tests.support.on_own_disk", *command, env=environment) as run:
        output = followed_to(run, FULL_FROM)
        disk = opened(run.process.pid, run_dir)
        seen = Path(f"/proc/self/fd/{disk}")
        wait_for_tensorboard(seen, FULL_FROM)
        fill(seen)
        output += followed_to(run, ROOM_FROM)
        if finds_room:
            (seen / "ballast").unlink()
        output += run.process.stdout.read()
        assert run.process.wait() == 0, output
        run.assert_nothing_left()
    rows, rollouts = steps_of(seen)
    timeline = [json.loads(line) for line in (seen / "timeline.jsonl").read_text().splitlines()]
    os.close(disk)
    printed = re.findall(rf"^step +(\d+)/{STEPS}", output, re.M)
    assert [*map(int, printed)] == [*range(STEPS + 1)], output
    assert re.search(rf"steps +{STEPS} in ", output) and "Traceback" not in output, output
    for records in ("rollouts/", "tokens/"):
        told = rf"warning: {records} could not be written \d times: .*No space left"
        assert re.search(told, output), output
    steps = [line["step"] for line in timeline]
    assert steps == sorted({*steps}) and {*range(1, FULL_FROM)} <= {*steps}
    assert (steps == [*range(1, STEPS + 1)]) == finds_room
    assert {*range(1, FULL_FROM + 1)} <= rollouts
    assert rollouts.isdisjoint(range(FULL_FROM + 2, ROOM_FROM + 1))
    if finds_room:
        assert [*rows] == [*range(STEPS + 1)] and {*range(ROOM_FROM + 2, STEPS + 1)} <= rollouts
        assert rows[FULL_FROM]["run/lost_writes"] == 0 < rows[ROOM_FROM]["run/lost_writes"]
    else:
        assert FULL_FROM <= max(rows) <= FULL_FROM + 1 and max(rollouts) <= FULL_FROM + 1
        assert rows[FULL_FROM]["run/lost_writes"] > 0  # by the tracker
        for name in ("metrics.jsonl", "timeline.jsonl"):
            assert re.search(rf"warning: \d rows of {name} could not be written", output)
        assert re.search(r"warning: .*failed \d+ times?: .*Connection refused", output), output
