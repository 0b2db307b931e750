"""A reward that raises and hangs: scored as failed, counted, shown; the run goes on to its end."""

import pytest

from tests.end_to_end.runs import SMALL, started

REWARD = """
import time

def score(prompt, response, example):
    if len(response) % 2:
        raise ValueError("odd")
    if len(response) % 8 == 0:
        time.sleep(3600)
    return 1.0
"""


@pytest.mark.slow
def test_failing_rewards_are_counted_and_do_not_stop_the_run(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "my_reward.py").write_text(REWARD)
    overrides = ["reward.function=my_reward.score", "~reward.args.mode", "reward.timeout_s=0.2"]
    # Each reward that hangs costs a process, of which evaluation needs no more.
    overrides += ["reward.failed_score=-1.0", "data.num_eval_problems=4", "eval.greedy=false"]
    with started(run_dir, *SMALL, *overrides) as run:
        output = run.output()
        assert run.process.returncode == 0, output
        for row in run.metrics()[1:]:
            assert 0 < row["reward/failed"] < 32
            # 32 responses: those that failed count -1, the others 1.
            assert abs(row["reward/mean"] - (32 - 2 * row["reward/failed"]) / 32) < 1e-6
        assert "rewards failed and got -1; the first: " in output
        run.assert_nothing_left()
