"""Which checkpoints stay: the newest and the best."""

import itertools
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.checkpoint import manifest as manifests
from hybridrl.checkpoint.commit import finish_deletions, prune
from tests.support.checkpoint_cases import manifest, pruned, save

pytestmark = pytest.mark.full

METRIC = "eval/accuracy"
DAMAGED = "damaged"


def make(run_dir: Path, scores: dict[int, object]) -> Path:
    """A run with a checkpoint for each step, of this score; None for a null, "" for no metric."""
    folder = run_dir / "checkpoints"
    for step, score in scores.items():
        one = folder / f"step_{step:08d}"
        one.mkdir(parents=True)
        metrics = {METRIC: score} if score not in ("", DAMAGED) else {}
        (one / "manifest.json").write_bytes(manifests.encode(manifest(step, {}, **metrics)))
        if score == DAMAGED:
            os.truncate(one / "manifest.json", 100)
    return run_dir


def steps(paths) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in paths)


def left(run_dir: Path) -> list[int]:
    return steps((run_dir / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("scores", "arguments", "stay"),
    [
        ({1: 0.9, 2: 0.1, 3: 0.2}, {"keep_last": 1}, [3]),
        ({1: 0.9, 2: 0.1, 3: 0.2}, {"keep_last": 0}, [1, 2, 3]),
        ({1: 0.9, 2: 0.1, 3: 0.2}, {"keep_last": 9}, [1, 2, 3]),
        ({1: 0.9, 2: 0.1, 3: 0.2}, {"keep_last": 1, "best": METRIC}, [1, 3]),
        ({1: 0.9, 2: 0.1, 3: 0.2}, {"keep_last": 1, "best": f"-{METRIC}"}, [2, 3]),
        ({1: 0.9, 2: 0.1, 3: 0.2}, {"keep_last": 1, "best": "other"}, [3]),
        # The newer one of a tie, where the larger wins and where the smaller does.
        ({1: 0.9, 2: 0.9, 3: 0.2}, {"keep_last": 1, "best": METRIC}, [2, 3]),
        ({1: 0.1, 2: 0.1, 3: 0.2}, {"keep_last": 1, "best": f"-{METRIC}"}, [2, 3]),
        # The best is the newest.
        ({1: 0.1, 2: 0.1, 3: 0.9}, {"keep_last": 1, "best": METRIC}, [3]),
        # Those without the metric, or with null, do not compete, whichever sign is better.
        ({1: "", 2: 0.1, 3: None, 4: ""}, {"keep_last": 1, "best": f"-{METRIC}"}, [2, 4]),
        ({1: "", 2: -0.1, 3: None, 4: ""}, {"keep_last": 1, "best": METRIC}, [2, 4]),
        # Damaged ones neither count nor go.
        ({1: 0.9, 2: 0.1, 3: DAMAGED}, {"keep_last": 1}, [2, 3]),
        ({1: DAMAGED, 2: 0.1, 3: 0.2}, {"keep_last": 1}, [1, 3]),
        ({}, {"keep_last": 1, "best": METRIC}, []),
    ],
)
def test_what_stays(tmp_path, scores, arguments, stay):
    (tmp_path / "checkpoints").mkdir()
    gone = pruned(make(tmp_path, scores), **arguments)
    assert left(tmp_path) == stay
    assert steps(gone) == sorted(scores.keys() - set(stay))


@given(
    scores=st.dictionaries(
        st.integers(0, 200), st.sampled_from([0.0, 0.5, 1, -2.5, None, "", DAMAGED]), max_size=8
    ),
    keep_last=st.integers(0, 4),
    sign=st.sampled_from(["", "-"]),
)
@settings(max_examples=60, deadline=None)
def test_newest_and_best_stay_and_no_others(scores, keep_last, sign):
    whole = {step: score for step, score in scores.items() if score != DAMAGED}
    numbers = [step for step, score in whole.items() if score not in ("", None)]
    better = -1 if sign else 1
    with tempfile.TemporaryDirectory() as folder:
        run_dir = make(Path(folder), scores)
        pruned(run_dir, keep_last, sign + METRIC)
        stay = set(left(run_dir)) if scores else set()
        again = pruned(run_dir, keep_last, sign + METRIC)
    for step in scores:
        newer = sum(other > step for other in whole)
        beaten_by = sum(
            (better * whole[other], other) > (better * whole[step], step)
            for other in numbers
            if step in numbers
        )
        is_best = step in numbers and beaten_by == 0
        is_kept = step not in whole or keep_last == 0 or newer < keep_last
        assert (step in stay) == (is_kept or is_best)
    assert again == []


def test_several_may_remove_the_same(tmp_path):
    """A start that ends deletions, while the one before, which has failed, is still at them."""
    run_dir = make(tmp_path, dict.fromkeys(range(1, 5), 0.5))
    folders = list((run_dir / "checkpoints").iterdir())
    for n, folder in itertools.product(range(500), folders):
        (folder / str(n)).touch()
    prune(run_dir, keep_last=1)
    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(finish_deletions, [run_dir / "checkpoints"] * 4)] == [None] * 4
    assert left(run_dir) == [4]


def test_of_a_run_that_never_saved_nothing_goes(tmp_path):
    assert pruned(tmp_path, keep_last=1, best=METRIC) == []
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_lost_a_file_does_not_push_out_a_whole_one(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step)
    (tmp_path / "checkpoints" / "step_00000030" / "driver.json").unlink()
    assert steps(pruned(tmp_path, keep_last=1)) == [10]
    assert left(tmp_path) == [20, 30]


def test_a_checkpoint_behind_a_link_goes_without_what_it_points_to(tmp_path):
    run_dir = make(tmp_path / "run", {1: 0.5, 2: 0.5})
    one = run_dir / "checkpoints" / "step_00000001"
    shutil.move(one, tmp_path / "elsewhere")
    one.symlink_to(tmp_path / "elsewhere")
    assert pruned(run_dir, keep_last=1) == [one]
    assert left(run_dir) == [2]
    assert (tmp_path / "elsewhere" / "manifest.json").is_file()
