"""metrics.png holds the curves: ink where there are points, less where there are none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from matplotlib.image import imread

from hybridrl.trainer.tracking.plot import SUPERVISED_PANELS, Panel, draw

ROOT = Path(__file__).resolve().parents[2]
BLUE = np.array([0x1F, 0x6F, 0xB2]) / 255


def run_dir(path: Path, rows: list[dict]) -> Path:
    path.mkdir()
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows(values: list[float | None]) -> list[dict]:
    names = (
        "reward/mean",
        "actor/kl",
        "response/length_mean",
        "rollout/tokens_per_second",
        "rollout/log_prob_diff_mean",
        "eval/accuracy",
    )
    return [{"step": step} | dict.fromkeys(names, v) for step, v in enumerate(values)]


def drawn(folder: Path, title: str) -> Path:
    draw(folder, title)
    return folder / "metrics.png"


def blue_pixels(path: Path) -> list[int]:
    """Pixels of the first curve's colour in each sixth of the picture."""
    image = imread(path)[..., :3]
    height, width = image.shape[:2]
    assert height > 400 and width > 600
    is_blue = np.abs(image - BLUE).max(axis=-1) < 0.02
    return [
        int(third.sum())
        for half in np.array_split(is_blue, 2)
        for third in np.array_split(half, 3, 1)
    ]


def test_each_of_the_six_panels_has_its_curve(tmp_path):
    path = drawn(run_dir(tmp_path / "a", rows([0.1, 0.4, 0.3, 0.6])), "a run")
    assert min(blue_pixels(path)) > 300


def test_supervised_fine_tuning_has_panels_of_its_own(tmp_path):
    panels = [*SUPERVISED_PANELS, Panel("", "", {"": "eval/accuracy"})]
    names = [name for panel in panels for name in panel.metrics.values()]
    of_steps = [
        {"step": step} | dict.fromkeys(names, step / 4) | {"eval/nll": 1 - step / 4}
        for step in range(4)
    ]
    assert min(blue_pixels(drawn(run_dir(tmp_path / "a", of_steps), "a run"))) > 300


def test_nulls_are_left_out_of_a_curve(tmp_path):
    """Steps without evaluation break no line: two points and the line between them remain."""
    whole = run_dir(tmp_path / "a", rows([0.0, 0.5, 1.0]))
    sparse = run_dir(tmp_path / "b", rows([0.0, None, 1.0]))
    more, less = blue_pixels(drawn(whole, "")), blue_pixels(drawn(sparse, ""))
    assert all(a / 2 < b < a for a, b in zip(more, less, strict=True)), (more, less)


def test_run_without_numbers_still_gets_a_picture(tmp_path):
    path = drawn(run_dir(tmp_path / "a", [{"step": 0}]), "ended early")
    assert blue_pixels(path) == [0] * 6


def test_intervals_are_drawn_around_their_curve(tmp_path):
    plain = rows([0.2, 0.5, 0.8])
    with_band = [row | {"eval/ci95": 0.1} for row in plain]
    paths = [drawn(run_dir(tmp_path / n, r), "") for n, r in (("a", plain), ("b", with_band))]
    before, after = (imread(path)[..., :3] for path in paths)
    tinted = np.abs(before - after).max(axis=-1) > 0.05
    height, width = tinted.shape
    assert tinted[height // 2 :, 2 * width // 3 :].sum() > 1000
    assert not tinted[: height // 2].any()


def test_a_rule_of_the_users_own_is_drawn(tmp_path):
    plain = [row | {"eval/accuracy_flexible": 0.9} for row in rows([0.2, 0.5, 0.8])]
    own = [row | {"eval/accuracy_right": 0.1, "eval/ci95_right": 0.05} for row in plain]
    paths = [drawn(run_dir(tmp_path / n, r), "") for n, r in (("a", plain), ("b", own))]
    before, after = (imread(path)[..., :3] for path in paths)
    assert (np.abs(before - after).max(axis=-1) > 0.05).sum() > 1000


FIRST_PLOT = """
import logging, sys
from pathlib import Path
from hybridrl.trainer.tracking.plot import draw
logging.basicConfig(level=logging.INFO)
draw(Path(sys.argv[1]), "title")
"""


def test_the_first_picture_on_a_machine_says_nothing(tmp_path):
    """matplotlib looks for all fonts then, and logs it."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    environment = os.environ | {"MPLCONFIGDIR": str(tmp_path / "none_yet")}
    command = [sys.executable, "-c", FIRST_PLOT, tmp_path]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "metrics.png").exists()


WITHOUT_EXTRAS = """
import logging, sys
from pathlib import Path
sys.modules.update(dict.fromkeys(["matplotlib", "tensorboard", "peft", "math_verify"]))
import hybridrl.main
from hybridrl.config.checks.resources import package_problems
from hybridrl.distributed.storage import export
from hybridrl.trainer.tracking.plot import draw
from hybridrl.trainer.tracking.tracker import Tracker
from tests.run_configs import run_config
logging.basicConfig(level=logging.INFO, format="%(message)s")
folder = Path(sys.argv[1])
config = run_config("tracking.tensorboard=false")
assert list(package_problems(config)) == []
tracker = Tracker(folder, config)
tracker.log(0, {"reward/mean": 1.0})
tracker.close()
draw(folder, "title")
print(*package_problems(run_config()))
"""


def test_a_run_needs_none_of_the_extras(tmp_path):
    """None in sys.modules makes an import fail as that of a package that is not installed."""
    command = [sys.executable, "-c", WITHOUT_EXTRAS, tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == "metrics.png is not drawn: matplotlib is not installed\n"
    assert "set tracking.tensorboard=false" in done.stdout
    names = ["metrics.jsonl", "timeline.jsonl"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
