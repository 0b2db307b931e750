"""The recipe as shipped: it learns more than the marker, for three seeds, within four minutes."""

import time

import pytest

from tests.end_to_end.runs import started


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_held_out_accuracy_rises(tmp_path, seed):
    start = time.monotonic()
    with started(tmp_path / "run", "+recipe=gsm8k_ppo", "hardware=cpu", f"seed={seed}") as run:
        output = run.output(timeout=380)
        seconds = time.monotonic() - start
        assert run.process.returncode == 0, output
        rows = [row for row in run.metrics() if row["eval/accuracy"] is not None]
        run.assert_nothing_left()
    first, last = rows[0], rows[-1]
    assert last["eval/accuracy"] - first["eval/accuracy"] >= 0.35
    assert last["eval/accuracy_flexible"] - first["eval/accuracy_flexible"] >= 0.15
    assert last["eval/accuracy_unseen_flexible"] >= first["eval/accuracy_unseen_flexible"]
    assert seconds <= 240
