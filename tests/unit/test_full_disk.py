"""A full disk under the run directory: training goes on, and what was lost is told.

A real one: a small tmpfs that the probes below mount for themselves and fill up.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.host_cases import need_mounts

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[2]

FILL = """
import logging, os, sys
from pathlib import Path
disk = Path(sys.argv[1])
def fill():
    with open(disk / "ballast", "ab", buffering=0) as ballast:
        while True:
            try:
                ballast.write(bytes(4096))
            except OSError:
                return
def free():
    os.unlink(disk / "ballast")
"""

TRACKER = """
import json
from hybridrl.trainer.record import RolloutRecord
from hybridrl.trainer.tracking.rollout_log import write_rollouts
from hybridrl.trainer.tracking.best_effort_files import BestEffortFiles, replace_file
from hybridrl.trainer.tracking.tracker import Tracker, read_metrics
from tests.support.run_configs import run_config
logging.basicConfig(stream=sys.stderr, format="%(message)s")
tracker = Tracker(disk, run_config())
files = BestEffortFiles()
record = RolloutRecord(1, "p", "q", "r" * 9000, "a", 1.0, 4)
def keep(step):
    files.attempt("rollouts/", lambda: write_rollouts(disk, step, [record]))
    number = lambda new: new.write_text(str(step))
    files.attempt("number", lambda: replace_file(disk / "number", number))
def settle():
    (sink,) = tracker._sinks
    for call in list(sink._waiting):
        call.wait()
found = {"lost": []}
long = {f"metric/{k}": k / 3 for k in range(200)}
for step in range(8):
    settle()
    if step == 2:
        fill()
    if step == 6:
        found["while_full"] = [row["step"] for row in read_metrics(disk / "metrics.jsonl")]
        found["failures"] = [*tracker.failures()[:1], *files.lines()]
        found["number_while_full"] = (disk / "number").read_text()
        free()
    tracker.log(step, long)
    keep(step)
    found["lost"].append(tracker._metrics.waiting)
tracker.close()
found["rows"] = [row["step"] for row in read_metrics(disk / "metrics.jsonl")]
found["equal"] = read_metrics(disk / "metrics.jsonl") == tracker.rows
found["number"] = (disk / "number").read_text()
found["files"] = sorted(str(p.relative_to(disk)) for p in disk.rglob("*") if p.is_file())
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
shown = EventAccumulator(str(disk / "tensorboard"), {"scalars": 0}).Reload()
found["tensorboard"] = [[e.step for e in shown.Scalars(name)] for name in long]
found["sinks"] = tracker.failures()
print(json.dumps(found))
"""

SWEEP = """
from hybridrl.app.sweep import JobResult, read_results
logging.basicConfig(stream=sys.stdout, format="%(message)s")
for job in range(2):
    (disk / str(job)).mkdir()
    JobResult(job, [], "ok", 0.5, 1.0, str(disk / str(job)), "e" * 5000 * job).write()
    fill()
print([(result.job, result.status) for result in read_results(disk, since=0.0)])
print(sorted(str(path.relative_to(disk)) for path in disk.rglob("*.json*")))
"""

OUTPUT = """
from hybridrl.controller.output import redirect_output
redirect_output(disk / "worker.log")
fill()
for _ in range(3000):
    print("a user's line of output")
    logging.getLogger("x").warning("a line of the log")
free()
print("there is room again")
"""

LOGGING = """
from hybridrl.controller.output import guard_logging
logging.basicConfig(handlers=[logging.FileHandler(disk / "main.log")], format="%(message)s")
guard_logging()
fill()
for _ in range(3000):
    logging.getLogger("x").warning("a line of the log")
free()
logging.getLogger("x").warning("there is room again")
"""

DRIVER = """
from hybridrl.controller.output import guard_standard_output
fill()
guard_standard_output()
from rich.console import Console
for step in range(3000):
    Console(highlight=False).print(f"step {step}", soft_wrap=True)
"""


def on_small_disk(folder: Path, code: str, output: str = "") -> subprocess.CompletedProcess[str]:
    """Run code with a tmpfs of 288 KiB at `folder`, which is shown on stdout of `sh` at the end."""
    need_mounts()
    script = (
        f'mount -t tmpfs -o size=288k tmpfs {folder}; cd /; "$0" -c "$1" {folder} {output}; '
        f"code=$?; cat {folder}/*.log 2>/dev/null || true; exit $code"
    )
    return subprocess.run(
        ["unshare", "-m", "sh", "-uc", script, sys.executable, FILL + code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    """A tracker and the other files of eight steps; the disk is full from step 2 to step 5."""
    ran = on_small_disk(tmp_path_factory.mktemp("disk"), TRACKER)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1]), ran.stderr


def test_rows_that_found_no_room_are_written_when_there_is_some(tracked):
    found, _ = tracked
    assert found["while_full"] == [0, 1]
    assert found["lost"] == [0, 0, 1, 2, 3, 4, 0, 0]
    assert found["rows"] == list(range(8))
    assert found["equal"]


def test_tensorboard_gets_them_too_and_says_that_they_waited(tracked):
    found, told = tracked
    assert found["tensorboard"] == [list(range(8))] * 200
    assert found["sinks"] == [
        "TensorBoard failed 4 times: OSError: [Errno 28] No space left on device"
    ]
    assert told.count("TensorBoard does not get all metrics") == 1


def test_each_kind_of_lost_file_is_told_once_and_counted(tracked):
    found, told = tracked
    room = "[Errno 28] No space left on device"
    assert found["failures"] == [
        f"4 rows of metrics.jsonl could not be written: {room}",
        f"rollouts/ could not be written 4 times: {room}",
        f"number could not be written 4 times: {room}",
    ]
    for what in ("metrics.jsonl cannot", "rollouts/ could", "number could"):
        assert told.count(f"{what}") == 1


def test_no_half_file_is_left_and_older_ones_stay(tracked):
    found, _ = tracked
    assert (found["number_while_full"], found["number"]) == ("1", "7")
    kept = [f"rollouts/step_{step}.jsonl" for step in (0, 1, 6, 7)]
    events = [name for name in found["files"] if name.startswith("tensorboard/events")]
    expected = ["metrics.jsonl", *kept, *events, "number", "timeline.jsonl"]
    assert sorted(found["files"]) == sorted(expected)


def test_a_job_of_a_sweep_whose_result_has_no_room_says_so_and_the_sweep_goes_on(tmp_path):
    ran = on_small_disk(tmp_path, SWEEP)
    assert ran.returncode == 0, ran.stderr
    told, jobs, files = ran.stdout.splitlines()
    assert told.startswith(f"{tmp_path}/1/result.json could not be written: [Errno 28]")
    assert (jobs, files) == ("[(0, 'ok'), (1, 'failed')]", "['0/result.json']")


def test_a_worker_whose_log_has_no_room_goes_on_and_says_what_it_lost(tmp_path):
    ran = on_small_disk(tmp_path, OUTPUT)
    assert ran.returncode == 0, ran.stderr + ran.stdout
    assert "bytes of output are lost: no room]" in ran.stdout
    assert ran.stdout.endswith("there is room again\n")


def test_a_driver_whose_output_goes_to_a_full_disk_ends_well(tmp_path):
    ran = on_small_disk(tmp_path, DRIVER, f"> {tmp_path}/out.log 2>&1")
    assert ran.returncode == 0, ran.stdout


def test_a_log_file_that_has_no_room_makes_no_pages_of_errors(tmp_path):
    ran = on_small_disk(tmp_path, LOGGING)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "bytes of output are lost: no room]" in ran.stdout
    assert ran.stdout.endswith("there is room again\n")
