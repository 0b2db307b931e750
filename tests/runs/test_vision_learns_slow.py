"""The recipe with images as shipped: it learns to count what it sees, nothing from other pictures.

Each run leaves its curve and metrics in tests/.slow/, from which the recipe's README is made.
"""

import base64
import shutil
import time
from pathlib import Path

import pytest

from hybridrl.data.sources.shapes import NUM_HELD_OUT, NUM_TRAIN, shape_problems
from tests.support.data_configs import jsonl
from tests.support.runs import started

KEPT = Path(__file__).resolve().parents[1] / ".slow"


def scores_of(folder, name, *changes):
    """The evaluations of a run, all its rows, and its seconds."""
    KEPT.mkdir(exist_ok=True)
    start = time.monotonic()
    with started(folder, "+recipe=shapes_vision", "hardware=cpu", *changes) as run:
        output = run.output(timeout=480)
        seconds = time.monotonic() - start
        assert run.process.returncode == 0, output
        rows = run.metrics()
        run.assert_nothing_left()
        for file in ("report.html", "metrics.jsonl"):
            shutil.copy(run.run_dir / file, KEPT / f"shapes_vision_{name}_{file}")
    for row in rows[1:]:
        assert row["actor/first_log_ratio_max"] == 0.0
        assert row["rollout/log_prob_diff_mean"] < 1e-5
    return [row for row in rows if row["eval/accuracy"] is not None], seconds


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_it_learns_to_count_what_it_sees(tmp_path, seed):
    scores, seconds = scores_of(tmp_path / "run", seed, f"seed={seed}")
    first, last = scores[0], scores[-1]
    assert last["eval/accuracy_greedy"] - first["eval/accuracy_greedy"] >= 0.4
    assert last["eval/accuracy"] - first["eval/accuracy"] >= 0.3
    assert seconds <= 300


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_pictures_of_other_questions_teach_it_nothing(tmp_path):
    """Each question has the next one's picture: who looks is right as seldom as who does not."""
    files = {}
    for split, count in (("train", NUM_TRAIN), ("held_out", NUM_HELD_OUT)):
        rows = shape_problems(split, count)
        urls = [base64.b64encode(row["images"][0]["bytes"]).decode() for row in rows]
        shown = [f"data:image/png;base64,{url}" for url in [*urls[1:], urls[0]]]
        others = [row | {"images": [url]} for row, url in zip(rows, shown, strict=True)]
        files[split] = jsonl(tmp_path / f"{split}.jsonl", others)
    own = [f"data.train_files={files['train']}", f"data.eval_files={files['held_out']}"]
    scores, _ = scores_of(tmp_path / "run", "shuffled", *own)
    for decoding in ("", "_greedy"):
        name = f"eval/accuracy{decoding}"
        assert scores[-1][name] - scores[0][name] <= 0.15
        assert scores[-1][name] <= 0.35
