"""A disk that is full at any phase of a save, read-only or stubborn: what was saved stays."""

import errno

import pytest

from tests.support.disk_cases import Outcome
from tests.support.host_cases import probe_mounted

pytestmark = pytest.mark.full

MODULE = "tests.support.disk_cases"


@pytest.mark.parametrize(
    ("kind", "options", "phases"),
    [
        ("pages", "size=200k", ["state", "driver", "commit"]),
        ("inodes", "size=200k,nr_inodes=60", ["begin", "state", "driver", "commit"]),
    ],
)
def test_full_in_any_phase_the_last_one_stays(tmp_path, kind, options, phases):
    """Room for one page or inode more each time."""
    mounts = f"mount -t tmpfs -o {options} tmpfs {tmp_path}"
    call = f"with_room_for(Path('{tmp_path}'), '{kind}')"
    outcomes: list[Outcome] = probe_mounted(MODULE, call, mounts)
    for phase, *rest in outcomes:
        assert rest == [errno.ENOSPC, 20, 1, (), False], phase
    met = [outcome.phase for outcome in outcomes]
    assert list(dict.fromkeys(met)) == phases


def test_a_read_only_disk_fails_each_call_and_harms_nothing(tmp_path):
    mounts = f"mount -t tmpfs -o size=200k tmpfs {tmp_path}"
    errors = probe_mounted(MODULE, f"on_read_only(Path('{tmp_path}'))", mounts)
    assert errors == dict.fromkeys(["begin", "commit", "prune"], errno.EROFS)


def test_a_rename_that_fails_harms_nothing(tmp_path):
    mounts = f"mount -t tmpfs -o size=200k tmpfs {tmp_path}"
    refused = probe_mounted(MODULE, f"rename_refused(Path('{tmp_path}'))", mounts)
    names = [".step_00000030.partial", "step_00000020"]
    assert refused == (errno.EBUSY, names)
