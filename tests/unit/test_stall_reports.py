"""Stalls: whom a report blames, how it says who is where, and since when ranks are still."""

from pathlib import Path

import pytest

from hybridrl.controller.placement import Host, Slot
from hybridrl.controller.watch.process_snapshot import NO_STACKS, Traces, Unchanged
from hybridrl.controller.watch.stall_report import (
    MAX_DESCRIBED,
    RankReport,
    StallReport,
    format_ranks,
    format_report,
)
from hybridrl.distributed.position import DONE, Position

pytestmark = pytest.mark.full

PHASE = "rollout.reshard"
BUCKET_2 = Position(PHASE, "bucket", 2, 9, steps=4, changes=104)
BUCKET_3 = Position(PHASE, "bucket", 3, 9, steps=5, changes=105)
BEFORE = Position("actor.update", DONE, 0, 0, steps=30, changes=90)


def rank(number: int, position: Position | None, state: str = "S") -> RankReport:
    log = Path(f"/run/logs/here_rank{number}.log")
    host = Host(number, None, Slot("abcdef0123", "10.0.0.1", number), 100 + number, "here", log)
    return RankReport(host, position, state)


def stall(*seen: RankReport, finished: int = 0, phase: str = PHASE) -> StallReport:
    return StallReport(phase, seen, len(seen) + finished)


def blamed(of: StallReport) -> list[int]:
    return [s.host.rank for s in of.suspects()]


@pytest.mark.parametrize(
    ("seen", "finished", "suspects", "says"),
    [
        pytest.param(
            [rank(0, BUCKET_3), rank(1, BUCKET_2), rank(2, BUCKET_3)],
            0,
            [1],
            "rank 1 is in bucket 2 of 9, ranks 0 and 2 are in bucket 3 of 9",
            id="who is behind",
        ),
        pytest.param(
            [rank(0, BUCKET_2), rank(1, BUCKET_2), rank(2, BUCKET_3)],
            0,
            [0, 1],
            "ranks 0-1 are in bucket 2 of 9, rank 2 is in bucket 3 of 9",
            id="several are behind",
        ),
        pytest.param(
            [rank(0, BUCKET_2), rank(1, BUCKET_2)],
            0,
            [],
            "ranks 0-1 are in bucket 2 of 9",
            id="a tie blames nobody",
        ),
        pytest.param(
            [rank(0, BUCKET_2), rank(1, BUCKET_2, "T")],
            0,
            [1],
            "ranks 0-1 are in bucket 2 of 9",
            id="in a tie who is stopped",
        ),
        pytest.param(
            [rank(0, BUCKET_2), rank(1, BUCKET_3, "T")],
            0,
            [1],
            "rank 0 is in bucket 2 of 9, rank 1 is in bucket 3 of 9",
            id="who is stopped, whoever is behind",
        ),
        pytest.param(
            [rank(0, BUCKET_2), rank(1, BUCKET_2, "D")],
            0,
            [1],
            "ranks 0-1 are in bucket 2 of 9",
            id="in a tie who waits in the kernel",
        ),
        pytest.param(
            [rank(0, BUCKET_2, "D"), rank(1, BUCKET_2, "D")],
            0,
            [],
            "ranks 0-1 are in bucket 2 of 9",
            id="all wait in the kernel",
        ),
        pytest.param(
            [rank(0, BUCKET_2), rank(1, BEFORE)],
            0,
            [1],
            "rank 1 is idle after actor.update, rank 0 is in bucket 2 of 9",
            id="who has not begun",
        ),
        pytest.param(
            [rank(3, BUCKET_3)],
            3,
            [3],
            "rank 3 is in bucket 3 of 9, 3 others have finished",
            id="the only one left",
        ),
        pytest.param(
            [rank(0, BUCKET_3)],
            0,
            [],
            "rank 0 is in bucket 3 of 9",
            id="a single rank",
        ),
        pytest.param(
            [rank(0, BUCKET_3), rank(1, None, "?"), rank(2, None, "")],
            0,
            [2],
            "ranks 1-2 are at an unknown place, rank 0 is in bucket 3 of 9",
            id="who is gone",
        ),
        pytest.param(
            [rank(0, BUCKET_3), rank(1, None, "?")],
            0,
            [],
            "rank 1 is at an unknown place, rank 0 is in bucket 3 of 9",
            id="of whom nothing is known is not blamed",
        ),
    ],
)
def test_who_holds_the_others_up(seen, finished, suspects, says):
    of = stall(*seen, finished=finished)
    assert blamed(of) == suspects
    assert of.summary() == says


def test_among_ranks_in_one_place_the_devices_tell():
    """On GPUs all have enqueued everything long before."""
    seen = [
        rank(number, BUCKET_3)._replace(traces=Traces("", [], f"in bucket {passed + 1}", passed))
        for number, passed in enumerate([2, 1, 2])
    ]
    assert blamed(stall(*seen)) == [1]
    text = format_report(stall(*seen), "nobody moves", "Raise it.")
    assert "pid 101: in bucket 3 of 9, its device in bucket 2\n" in text
    unknown = [seen[0], seen[1], rank(2, BUCKET_3)]
    assert blamed(stall(*unknown)) == []


def test_methods_called_together_are_ordered_as_called():
    """A later method's first step is further than an earlier one's tenth."""
    earlier = Position("ref.score", "micro-batch", 10, 12, steps=10, changes=50)
    later = Position("actor.score", "", 0, 0, steps=0, changes=53)
    of = stall(rank(0, later), rank(1, earlier), phase="ref.score, actor.score")
    assert blamed(of) == [1]
    assert of.summary() == (
        "rank 1 is in ref.score, in micro-batch 10 of 12, rank 0 is in actor.score, "
        "at its beginning"
    )


def test_parts_are_ordered_by_steps_and_not_by_their_numbers():
    verify = Position(PHASE, "verify", 0, 0, steps=12, changes=112)
    assert blamed(stall(rank(0, BUCKET_3), rank(1, verify))) == [0]


def test_a_report_tells_all_of_the_suspect_first():
    stopped = rank(1, BUCKET_2, "T")._replace(
        traces=Traces("sync (engine.py:7)", ["/run/logs/nccl_trace_rank_1"])
    )
    text = format_report(stall(rank(0, BUCKET_3), stopped), "nobody moves", "Raise it.")
    lines = text.splitlines()
    assert lines[0] == ("nobody moves: rank 1 is in bucket 2 of 9, rank 0 is in bucket 3 of 9.")
    assert lines[1].startswith("  rank 1 on here (10.0.0.1, node abcdef01), slot 1, pid 101: ")
    assert "in bucket 2 of 9, stopped by a signal" in lines[1]
    assert lines[1].endswith("; kill -CONT 101 resumes it, sync (engine.py:7)")
    assert lines[2] == "    /run/logs/here_rank1.log"
    assert lines[3].startswith("  rank 0 on here") and lines[3].endswith(": in bucket 3 of 9")
    assert "at the end of their logs" in text
    assert "torchfrtrace --allow-incomplete-ranks --prefix nccl_trace_rank_ /run/logs" in text
    assert lines[-1] == "Raise it."


def test_no_stacks_are_in_the_log_of_a_rank_that_writes_none():
    silent = rank(0, BUCKET_2)._replace(traces=Traces(NO_STACKS, []))
    report = format_report(stall(silent), "no rank made progress", "advice")
    assert "it writes no stacks" in report and "The stacks" not in report


def test_of_many_ranks_the_first_are_described():
    of = stall(*(rank(number, BUCKET_2) for number in range(1024)))
    text = format_report(of, "nobody moves", "Raise it.")
    assert text.count("  rank ") == MAX_DESCRIBED
    assert f"\n  and {1024 - MAX_DESCRIBED} more\n" in text
    assert "ranks 0-1023 are in bucket 2 of 9" in text


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([3], "rank 3 is"),
        ([1, 0], "ranks 0-1 are"),
        ([0, 2], "ranks 0 and 2 are"),
        ([9, 0, 1, 2, 4, 8], "ranks 0-2, 4 and 8-9 are"),
    ],
)
def test_ranks_are_listed_shortly(numbers, expected):
    assert format_ranks(numbers, "is", "are") == expected


def test_nobody_is_still_while_one_moves():
    progress = Unchanged()
    for second in range(10):
        progress.note(0, (5, 0), second)
        progress.note(1, (second, 0), second)
    assert progress.seconds([0]) == 9
    assert progress.seconds([0, 1]) == 0


def test_a_rank_is_still_since_its_last_move():
    progress = Unchanged()
    for second, movement in enumerate([(1, 0), (1, 0), (2, 0), (2, 1), (2, 1), (2, 1)]):
        progress.note(0, movement, second)
    assert progress.seconds([0]) == 2


def test_of_whom_nothing_is_heard_is_not_still():
    progress = Unchanged()
    progress.note(0, (1, 0), 0.0)
    progress.note(0, (1, 0), 700.0)
    assert progress.seconds([0]) == 700.0
    assert progress.seconds([0, 1]) == 0.0
    progress.note(1, (1, 0), 600.0)
    assert progress.seconds([0, 1]) == 0.0
