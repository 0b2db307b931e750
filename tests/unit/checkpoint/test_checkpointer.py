"""What the loop's part of a save does where a disk is full, and says of what it cannot keep.

All of it in one process, with a disk of its own, as it takes seconds to start torch.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpointer_cases import DISK, After
from tests.support.host_cases import probe_mounted

pytestmark = pytest.mark.full

MODULE = "tests.support.checkpointer_cases"


@pytest.fixture(scope="module")
def disk(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def found(disk) -> dict[str, Any]:
    mounts = f"mount -t tmpfs -o size={DISK} tmpfs {disk}"
    return probe_mounted(MODULE, f"everything(Path('{disk}'))", mounts, OMP_NUM_THREADS="1")


@pytest.mark.parametrize(
    ("part", "step", "failures", "last"),
    [
        ("the first of all", 1, 1, None),
        ("driver.json", 3, 2, 2),
        ("shards", 4, 3, 2),
        ("at the end", 5, 4, 2),
        ("manifest", 6, 5, 2),
    ],
)
def test_a_save_without_room_is_counted_and_told_and_leaves_nothing(
    disk, found, part, step, failures, last
):
    after = found["full_disks"][part]
    (warning, *_) = after.warnings if part != "at the end" else after.warnings[1:]
    assert warning.startswith(f"the checkpoint of step {step} could not be written: ")
    assert "No space left on device" in warning
    folder = disk / "full_disks" / "checkpoints" / f"step_{last:08d}" if last else None
    assert warning.endswith(f"the last one is {folder}" if last else "there is none yet")
    assert after.failures == failures
    assert after.names == ([folder.name] if folder else [])
    assert after.newest == last


def test_once_there_is_room_saves_are_whole(found):
    outcomes = found["full_disks"]
    assert outcomes["before"] == After(1, [], ["step_00000002"], 2)
    assert outcomes["after"] == After(5, [], ["step_00000002", "step_00000007"], 7)


def test_a_save_counts_as_soon_as_it_is_whole_however_long_the_step_takes(found):
    """Its manifest has the metrics of its step, so it waits for those alone."""
    outcomes = found["by_itself"]
    assert outcomes["not reported"] == After(0, [], [".step_00000001.partial"], None)
    assert outcomes["reported"] == After(0, [], ["step_00000001"], 1)
    no_room = outcomes["no room"]
    assert (no_room.failures, no_room.names, no_room.newest) == (1, ["step_00000001"], 1)
    assert "No space left on device" in no_room.warnings[0]


@pytest.mark.parametrize("place", ["", "driver.json"])
def test_an_old_checkpoint_that_cannot_go_is_told_and_new_ones_are_whole(found, place):
    for step, after in enumerate(found["not_removed"][place], start=3):
        (warning,) = after.warnings
        assert warning.startswith("old checkpoints could not be removed: ")
        assert (place or "step_00000001") in warning
        assert (after.failures, after.newest) == (0, step)


def test_the_loop_does_not_wait_for_the_removal_of_an_old_checkpoint(found):
    meanwhile, at_the_end = found["slowly_removed"]
    removed = ".step_00000001.removed"
    assert meanwhile == After(0, [], [removed, "step_00000002"], 2)
    assert at_the_end == After(0, [], ["step_00000002"], 2)


def test_a_checkpoint_without_the_metric_to_keep_the_best_by_is_told_once(found):
    first, second, *others = found["without_the_metric"]
    assert first == [] and others == [[], [], []]
    (warning,) = second
    assert "checkpoint.keep_best = a/good" in warning and "step 2 " in warning
    assert "Did you mean a/goods?" in warning
