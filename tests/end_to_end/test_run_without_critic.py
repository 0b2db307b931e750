"""GRPO as shipped, two steps on a few problems: no critic anywhere, KL in the loss, on-policy."""

import math

from tests.end_to_end.runs import SMALL, started


def test_two_steps_of_grpo(tmp_path):
    with started(tmp_path / "run", "+recipe=gsm8k_grpo", *SMALL[1:], "eval.greedy=false") as run:
        output = run.output()
        assert run.process.returncode == 0, output
        rows = run.metrics()
        run.assert_nothing_left()
    assert "PPO with grpo" in output
    assert not any("critic" in name or name == "time/values_s" for row in rows for name in row)
    for row in rows[1:]:
        assert row["actor/first_log_ratio_max"] == 0.0
        assert row["actor/kl_coef"] == 0.04
        assert row["actor/kl_loss"] >= 0.0
        assert row["time/old_log_probs_s"] > 0.0 and row["time/ref_log_probs_s"] > 0.0
        assert all(value is None or math.isfinite(value) for value in row.values())
    # The reference is where training began: the first step's KL is 0, the second's is not.
    assert abs(rows[1]["actor/kl"]) < 1e-9 < rows[2]["actor/kl"]
