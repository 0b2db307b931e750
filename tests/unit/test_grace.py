"""A run whose phases and checkpoints are longer than SIGTERM's grace is told so, once."""

import pytest

from hybridrl.controller.calls import Span
from hybridrl.trainer.record import StepRecord
from hybridrl.trainer.timing.phases import GraceCheck
from hybridrl.trainer.timing.timeline import Section, Timeline

STEP = Timeline(
    Span("step", 0.0, 30.0),
    [Section(Span("rollout", 1.0, 18.0), []), Section(Span("update", 20.0, 9.0), [])],
)
RECORD = StepRecord(1, {}, None, STEP)


@pytest.mark.parametrize(
    ("grace_s", "write_s", "is_told"),
    [(25.0, 7.5, True), (25.0, 6.5, False), (0.0, 7.5, False), (25.0, None, False)],
)
def test_the_longest_phase_and_the_writing_must_fit(grace_s, write_s, is_told):
    told = []
    check = GraceCheck(grace_s, told.append, lambda: write_s)
    assert check.after(RECORD) is RECORD
    assert len(told) == is_told
    if is_told:
        assert "rollout took 18.0 s and writing one 7.5 s" in told[0]
        assert "checkpoint.on_sigterm is 25 s" in told[0]
        check.after(RECORD)
        assert len(told) == 1
