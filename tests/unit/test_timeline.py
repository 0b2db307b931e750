"""A step's time on a hand-made timeline of two ranks: idle by rank and section, and the trace.

driver   0 .. 10     rollout 1 .. 5          update 6 .. 9.5
rank 0               generate 1.5 .. 4.5     actor 6.5 .. 9, critic 9 .. 9.25
rank 1               generate 1.5 .. 3.5     actor 6.5 .. 8.5, critic 8.5 .. 9.25
"""

import json

import pytest

from hybridrl.controller.calls import Span, SpanLog, Stopwatch
from hybridrl.trainer.timing.phases import Phases
from hybridrl.trainer.timing.timeline import Section, Timeline, write_trace

T0 = 1_700_000_000.0
ROLLOUT = Section(
    Span("rollout", T0 + 1, 4.0),
    [[Span("rollout.generate", T0 + 1.5, 3.0)], [Span("rollout.generate", T0 + 1.5, 2.0)]],
)
UPDATE = Section(
    Span("update", T0 + 6, 3.5),
    [
        [Span("actor.update", T0 + 6.5, 2.5), Span("critic.update", T0 + 9, 0.25)],
        [Span("actor.update", T0 + 6.5, 2.0), Span("critic.update", T0 + 8.5, 0.75)],
    ],
)
STEP = Timeline(Span("step", T0, 10.0), [ROLLOUT, UPDATE])


def test_idle_time_by_rank():
    metrics = STEP.metrics()
    # Busy: 3 + 2.5 + 0.25 and 2 + 2 + 0.75 of 10 seconds.
    assert metrics["idle/rank0_s"] == pytest.approx(4.25)
    assert metrics["idle/rank1_s"] == pytest.approx(5.25)
    assert metrics["idle/mean_s"] == pytest.approx(4.75)
    assert metrics["idle/max_s"] == pytest.approx(5.25)
    assert metrics["idle/fraction"] == pytest.approx(0.475)


def test_idle_time_by_section_adds_up_to_the_mean():
    metrics = STEP.metrics()
    assert metrics["idle/rollout_s"] == pytest.approx((1.0 + 2.0) / 2)
    assert metrics["idle/update_s"] == pytest.approx((0.75 + 0.75) / 2)
    assert metrics["idle/between_s"] == pytest.approx(2.5)
    assert metrics["idle/mean_s"] == 1.5 + 0.75 + 2.5


def test_ranks_that_only_sample_work_beside_the_sections():
    """Rank 1 samples from 1.5 to 9, which ends in the update, and rank 0 trains meanwhile."""
    ahead = Span("rollout.generate_ahead", T0 + 1.5, 7.5)
    first = ROLLOUT.ranks[0], []
    second = UPDATE.ranks[0], [ahead]
    sections = [Section(s.span, list(r)) for s, r in ((ROLLOUT, first), (UPDATE, second))]
    metrics = Timeline(STEP.step, sections, range(1, 2)).metrics()
    assert metrics["idle/rank0_s"] == metrics["idle/trainers_s"] == pytest.approx(4.25)
    assert metrics["idle/rank1_s"] == metrics["idle/engines_s"] == pytest.approx(2.5)
    # Of rank 1: 1 to 1.5 and 9 to 9.5 in the sections, 0 to 1 and 9.5 to 10 between them.
    assert metrics["idle/rollout_s"] == pytest.approx((1.0 + 0.5) / 2)
    assert metrics["idle/update_s"] == pytest.approx((0.75 + 0.5) / 2)
    assert metrics["idle/between_s"] == pytest.approx((2.5 + 1.5) / 2)
    assert metrics["time/outside_s"] == pytest.approx(10 - 3.5 - 3.0)


def test_a_section_that_comes_twice_counts_together():
    again = Section(Span("rollout", T0 + 9.5, 0.5), [[], []])
    metrics = Timeline(STEP.step, [ROLLOUT, UPDATE, again]).metrics()
    assert metrics["idle/rollout_s"] == pytest.approx(2.0)
    assert metrics["idle/between_s"] == pytest.approx(2.0)


def test_outside_is_what_the_slowest_ranks_do_not_compute():
    # Rank 0's 3 seconds of the rollout; 2.75 seconds of either rank in the update.
    assert STEP.metrics()["time/outside_s"] == pytest.approx(10 - 3 - 2.75)


def test_a_switch_is_from_the_last_update_to_the_next_sampling():
    """Rank 0's takes longest: its critic ends at 9.25, and it samples again at 12."""
    taken = [
        *([[], []], UPDATE.ranks),
        [[Span("rollout.generate", T0 + 12, 1.0)], [Span("rollout.generate", T0 + 11.75, 1.0)]],
        [[Span("rollout.generate", T0 + 14, 1.0)], [Span("rollout.generate", T0 + 14, 1.0)]],
    ]
    phases, switches = Phases(lambda: taken.pop(0)), []
    with phases.step():
        for name in ("update", "rollout", "evaluate"):
            with phases.section(name):
                pass
            switches.append(phases.switch_s)
    assert switches == [None, pytest.approx(2.75), None]


def test_calls_that_compute_nothing_are_outside_but_not_idle():
    reshard = Section(Span("reshard", T0, 1.0), [[Span("rollout.reshard", T0, 1.0)]] * 2)
    metrics = Timeline(STEP.step, [reshard, ROLLOUT, UPDATE]).metrics()
    assert metrics["idle/reshard_s"] == 0
    assert metrics["idle/rank0_s"] == pytest.approx(3.25)
    assert metrics["time/outside_s"] == pytest.approx(4.25)


def test_a_step_without_sections_has_no_ranks():
    assert Timeline(Span("step", T0, 1.0), []).metrics() == {}


def test_trace_has_a_row_for_the_driver_and_one_for_each_rank(tmp_path):
    path = tmp_path / "profile" / "phases_step_3.json"
    write_trace(path, STEP, "step 3")
    events = json.loads(path.read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert rows == {0: "driver", 1: "rank 0", 2: "rank 1"}
    spans = {(e["tid"], e["name"]): (e["ts"], e["dur"]) for e in events if e["ph"] == "X"}
    assert spans == {
        (0, "step"): (0, 1e7),
        (0, "rollout"): (1e6, 4e6),
        (0, "update"): (6e6, 3.5e6),
        (1, "rollout.generate"): (1.5e6, 3e6),
        (2, "rollout.generate"): (1.5e6, 2e6),
        (1, "actor.update"): (6.5e6, 2.5e6),
        (1, "critic.update"): (9e6, 0.25e6),
        (2, "actor.update"): (6.5e6, 2e6),
        (2, "critic.update"): (8.5e6, 0.75e6),
    }


def test_spans_are_taken_once():
    log = SpanLog(2)
    first, second = Span("a", T0, 1.0), Span("b", T0, 2.0)
    log.note([[first], []])
    log.note([[], [second]])
    assert log.take() == [[first], [second]]
    assert log.take() == [[], []]


def test_a_stopwatch_keeps_the_span_of_a_block_that_raised():
    watch = Stopwatch("fails")
    with pytest.raises(KeyError), watch:
        raise KeyError
    assert watch.span.name == "fails"
    assert 0 <= watch.span.seconds < 1
