"""Positions: what is written is read, by others too, whatever state the writer is in."""

import os
import signal
import subprocess
import sys
import time

import pytest

from hybridrl.controller.watch.process_snapshot import (
    process_snapshots,
    progress_counters,
    state_of,
    write_traces,
)
from hybridrl.distributed import position
from hybridrl.distributed.position import DONE, Position, open_position

pytestmark = pytest.mark.full

WRITER = """
import sys
from hybridrl.distributed import position
position.publish()
{moves}
print("there", flush=True)
{end}
"""


@pytest.fixture
def writers():
    """Starts processes that publish, make some moves and come to an end of their own."""
    started = []

    def start(moves: str, end: str = "sys.stdin.read()") -> subprocess.Popen:
        code = WRITER.format(moves=moves, end=end)
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == b"there\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def read(pid: int) -> Position:
    reader = open_position(pid)
    assert reader is not None
    found = reader.read()
    reader.close()
    return found


@pytest.mark.parametrize(
    ("moves", "expected", "within"),
    [
        ("", Position("", "", 0, 0, 0, 0), "at its beginning"),
        ("position.enter('a.b')", Position("a.b", "", 0, 0, 0, 1), "at its beginning"),
        (
            "position.enter('a.b'); position.at('bucket', 1, 9); position.at('bucket', 2, 9)",
            Position("a.b", "bucket", 2, 9, 2, 3),
            "in bucket 2 of 9",
        ),
        (
            "position.enter('a.b'); position.at('bucket', 2, 9); position.at('verify')",
            Position("a.b", "verify", 0, 0, 2, 3),
            "in verify",
        ),
        (
            "position.enter('a.b'); position.at('x', 7); position.enter('c'); position.at('x', 1)",
            Position("c", "x", 1, 0, 1, 4),
            "in x 1",
        ),
        (
            "position.enter('a.b'); position.at('x', 7); position.leave()",
            Position("a.b", DONE, 0, 0, 2, 3),
            "in done",
        ),
    ],
)
def test_another_process_reads_what_was_written(writers, moves, expected, within):
    found = read(writers(moves).pid)
    assert found == expected
    assert found.within() == within
    assert found.is_idle == (expected.phase == "" or expected.part == DONE)


def test_a_stopped_process_can_be_read(writers):
    writer = writers("position.enter('a.b'); position.at('bucket', 3)")
    writer.send_signal(signal.SIGSTOP)
    while state_of(writer.pid) != "T":
        time.sleep(0.01)
    ((found, state),) = process_snapshots([writer.pid])
    assert (found.part, found.number, state) == ("bucket", 3, "T")


def test_the_last_position_outlives_the_process(writers):
    writer = writers("position.enter('a.b')", end="sys.stdin.read(1); position.at('end', 5)")
    reader = open_position(writer.pid)
    writer.communicate(b"x")
    assert reader is not None and reader.read() == Position("a.b", "end", 5, 0, 1, 2)
    assert process_snapshots([writer.pid]) == [(None, "")]
    reader.close()


def test_a_process_without_positions_is_no_error(writers):
    assert open_position(os.getpid()) is None
    position.enter("a.b")
    position.at("bucket", 1, 2)
    position.leave()
    assert open_position(os.getpid()) is None
    assert progress_counters([os.getpid(), 2**22 + 1]) == [None, None]


def test_names_of_any_length_and_kind_are_taken(writers):
    found = read(writers("position.enter('\\ud800' + 'ü' * 500); position.at('y' * 96, 1)").pid)
    assert found.phase.startswith("?ü")
    assert (found.part, found.number) == ("y" * 96, 1)


def test_who_writes_a_file_moves(writers, tmp_path):
    """Saving a model keeps a rank in one place for long."""
    path = tmp_path / "weights"
    step = f"open({str(path)!r}, 'wb').write(bytes(40 << 20)); print('written', flush=True)"
    writer = writers("", end=f"sys.stdin.read(1); {step}; sys.stdin.read()")
    ((changes, traffic),) = progress_counters([writer.pid])
    writer.stdin.write(b"x")
    writer.stdin.flush()
    assert writer.stdout.readline() == b"written\n"
    ((changes_after, traffic_after),) = progress_counters([writer.pid])
    assert changes_after == changes
    assert traffic_after - traffic >= 2


def test_a_process_that_writes_no_stacks_is_told_of(writers, tmp_path):
    """As one that hangs with signals blocked, or in the kernel."""
    block = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())"
    writer = writers(block)
    (found,) = write_traces([writer.pid], [0], [tmp_path / "here_rank0.log"])
    assert found.frame.startswith("it writes no stacks")
    assert found.records == []


PASSED = """
class Passed:
    def __init__(self, passed):
        self.query = lambda: passed
position.enter("a.b")
for number in range(1, 5):
    position.mark("bucket", number, 4, Passed(number <= {passed}))
position.at("verify")
position.look_at_device()
"""


@pytest.mark.parametrize(("passed", "place"), [(0, "in bucket 1 of 4"), (2, "in bucket 3 of 4")])
def test_the_device_is_at_the_first_mark_that_it_has_not_passed(writers, passed, place):
    found = read(writers(PASSED.format(passed=passed)).pid)
    assert (found.within(), found.device, found.passed) == ("in verify", place, passed)


def test_a_device_that_has_passed_all_marks_is_nowhere(writers):
    found = read(writers(PASSED.format(passed=4)).pid)
    assert (found.device, found.passed) == ("", 4)


def test_what_was_seen_of_the_device_is_forgotten_with_the_next_move(writers):
    found = read(writers(PASSED.format(passed=2) + "position.at('end')").pid)
    assert (found.device, found.passed) == ("", -1)
    found = read(
        writers(PASSED.format(passed=2) + "position.enter('c'); position.look_at_device()").pid
    )
    assert (found.device, found.passed) == ("", 0)
