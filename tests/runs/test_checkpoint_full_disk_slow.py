"""A run whose disk for checkpoints is full at first goes on, says so, and saves once it can."""

import os
import shutil

import pytest

from hybridrl.checkpoint.files import checkpoints_folder
from hybridrl.checkpoint.verification import newest_good
from tests.support.host_cases import need_mounts
from tests.support.kill_and_resume import steps_logged, wait_until
from tests.support.on_own_disk import opened, resize
from tests.support.runs import SMALL, launched

pytestmark = pytest.mark.slow

FULL, ROOMY = 2**18, 2**30  # bytes
STEPS = 6


def test_a_run_goes_on_where_checkpoints_find_no_room_until_they_find_some(tmp_path):
    need_mounts()
    run_dir = tmp_path / "run"
    folder = checkpoints_folder(run_dir)
    folder.mkdir(parents=True)
    overrides = [*SMALL, f"trainer.total_steps={STEPS}", "checkpoint.every_steps=1"]
    command = [str(folder), str(FULL), "hybridrl.main", *overrides, f"hydra.run.dir={run_dir}"]
    with launched(run_dir, "tests.support.on_own_disk", *command) as run:
        wait_until(lambda: steps_logged(run_dir) > 2, "step 2", run)
        resize(run.process.pid, folder, ROOMY)
        disk = opened(run.process.pid, folder)
        output = " ".join(run.ended().split())
    lost = "the checkpoint of step 1 could not be written: [Errno 28] No space left on device: "
    assert lost in output and "shard-00001.safetensors'; there is none yet" in output, output
    failed = [row["checkpoint/failed"] for row in run.metrics()[1:]]
    assert failed[:2] == [0.0, 1.0] and failed[-1] < STEPS - 1
    assert output.count("could not be written") == failed[-1]
    assert f"checkpoints {failed[-1]:.0f} lost" in output, output
    seen = shutil.copytree(f"/proc/self/fd/{disk}", checkpoints_folder(tmp_path / "seen"))
    os.close(disk)
    assert sorted(os.listdir(seen)) == [f"step_{n:08d}" for n in (STEPS - 1, STEPS)]
    found = newest_good(tmp_path / "seen")
    assert (found.manifest.step, found.damaged) == (STEPS, ())
