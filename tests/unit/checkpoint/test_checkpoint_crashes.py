"""A process killed while it saves or prunes: a whole checkpoint stays, nothing lies about."""

import random
import subprocess
import sys
import time

import pytest

from hybridrl.checkpoint import commit
from hybridrl.checkpoint.files import steps_in
from hybridrl.checkpoint.verification import newest_good, verify
from tests.support.checkpoint_cases import hidden, pruned, save
from tests.support.namespaces import ROOT

pytestmark = pytest.mark.full

CHILD = [sys.executable, "-m", "tests.support.crash_cases"]


def test_killed_at_any_file_call_a_whole_checkpoint_stays(tmp_path):
    """The new one, or the one before."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    for old in (10, 20):
        save(run_dir, old, generation=1)
    (run_dir / "checkpoints" / ".step_00000040.partial" / "state").mkdir(parents=True)
    command = [*CHILD, "each_call", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    calls = int(done.stdout)
    kept = [assert_whole(tmp_path / str(n)) for n in range(calls + 1)]
    # Old ones stay until one instant, and new ones are there from then on.
    assert kept == sorted(kept) and set(kept) == {1, 2}
    assert kept.count(1) > 20 and kept.count(2) > 10


def assert_whole(run_dir) -> int:
    """The generation of the newest checkpoint after a kill, and after the next save begins."""
    for one in steps_in(run_dir / "checkpoints"):
        assert verify(run_dir / "checkpoints" / f"step_{one:08d}").step == one
    found = newest_good(run_dir)
    generation = found.manifest.metrics["generation"]
    assert found.manifest.step == (30 if generation == 2 else 20)
    partial = commit.begin(run_dir, 50)
    assert hidden(run_dir) == [partial.name]
    commit.abandon(partial)
    after = newest_good(run_dir)
    assert after.manifest == found.manifest and after.damaged == ()
    assert after.folder.name == f"step_{after.manifest.step:08d}"
    return generation


def test_killed_at_random_instants_no_reported_checkpoint_is_lost(tmp_path):
    draw = random.Random(7)
    reported, kills = 0, 40
    for _ in range(kills):
        with subprocess.Popen([*CHILD, "forever", tmp_path], cwd=ROOT, stdout=-1) as child:
            first = child.stdout.readline()
            time.sleep(draw.uniform(0.0, 0.03))
            assert child.poll() is None
            child.kill()
            reported = int((first + child.stdout.read()).split()[-1])
        found = newest_good(tmp_path)
        assert found.damaged == ()
        assert found.manifest.metrics["generation"] in (reported, reported + 1)
    commit.abandon(commit.begin(tmp_path, 10**6))
    assert hidden(tmp_path) == []


def test_the_next_prune_ends_a_deletion_and_leaves_a_save_alone(tmp_path):
    for step in (10, 20):
        save(tmp_path, step)
    folder = tmp_path / "checkpoints"
    (folder / "step_00000010").rename(folder / ".step_00000010.removed")
    partial = commit.begin(tmp_path, 30)
    (folder / ".step_00000005.removed").mkdir()
    assert pruned(tmp_path, keep_last=1) == []
    assert hidden(tmp_path) == [partial.name]
    assert newest_good(tmp_path).folder.name == "step_00000020"
