"""The recipes as shipped: they learn more than the marker, within four minutes each."""

import time

import pytest

from tests.end_to_end.runs import started


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("recipe", "seed"),
    [
        ("gsm8k_ppo", 1),
        ("gsm8k_ppo", 2),
        ("gsm8k_ppo", 3),
        ("gsm8k_grpo", 1),
        ("gsm8k_rloo", 1),
        ("gsm8k_reinforce_pp", 1),
        ("gsm8k_dapo", 1),
        ("gsm8k_gspo", 1),
        ("calculator_tool", 1),
        ("gsm8k_lora", 1),
    ],
)
def test_held_out_accuracy_rises(tmp_path, recipe, seed):
    start = time.monotonic()
    with started(tmp_path / "run", f"+recipe={recipe}", "hardware=cpu", f"seed={seed}") as run:
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
