"""The recipe of verifiers as shipped, not half of its steps: it learns, and no episode fails."""

import pytest

from tests.support.runs import started

pytest.importorskip("verifiers", reason="pip install 'hybridrl[verifiers]'")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_texts_are_written_from_the_end(tmp_path):
    steps = ["trainer.total_steps=36", "eval.every_steps=36", "data.num_eval_problems=64"]
    with started(tmp_path / "run", "+recipe=reverse_text", "hardware=cpu", *steps) as run:
        output = run.output(timeout=560)
        assert run.process.returncode == 0, output
        rows = run.metrics()
        run.assert_nothing_left()
    held_out = [row["eval/accuracy"] for row in rows if row["eval/accuracy"] is not None]
    assert held_out[0] < 0.35 and held_out[-1] - held_out[0] > 0.15
    assert all(row["reward/failed"] == 0 for row in rows[1:])
