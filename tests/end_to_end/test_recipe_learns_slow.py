"""The recipes as shipped: they learn more than the marker, within four minutes each.

Each leaves its curve and metrics in tests/.slow/, from which the recipes' READMEs are made.
"""

import shutil
import time
from pathlib import Path

import pytest

from tests.end_to_end.runs import started

KEPT = Path(__file__).resolve().parents[1] / ".slow"


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
    KEPT.mkdir(exist_ok=True)
    start = time.monotonic()
    with started(tmp_path / "run", f"+recipe={recipe}", "hardware=cpu", f"seed={seed}") as run:
        output = run.output(timeout=380)
        seconds = time.monotonic() - start
        assert run.process.returncode == 0, output
        rows = [row for row in run.metrics() if row["eval/accuracy"] is not None]
        run.assert_nothing_left()
        for name in ("metrics.png", "metrics.jsonl"):
            shutil.copy(run.run_dir / name, KEPT / f"{recipe}_{seed}_{name}")
    first, last = rows[0], rows[-1]
    assert last["eval/accuracy"] - first["eval/accuracy"] >= 0.35
    assert last["eval/accuracy_flexible"] - first["eval/accuracy_flexible"] >= 0.15
    assert last["eval/accuracy_unseen_flexible"] >= first["eval/accuracy_unseen_flexible"]
    assert seconds <= 240
