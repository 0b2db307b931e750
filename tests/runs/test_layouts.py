"""The recipe on several workers, profiled; in user modules and in sweeps."""

import json
import math
import re
import shlex
import shutil

import pytest

from hybridrl.models.resolve import EMBEDDED_FOLDER
from tests.support.runs import ROOT, SMALL, started
from tests.support.traces import assert_traces


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(
            ["cluster.gpus_per_node=2", "rollout.tensor_parallel_size=2"], marks=pytest.mark.slow
        ),
        pytest.param(["cluster.gpus_per_node=2"], marks=pytest.mark.slow),
        pytest.param(["cluster.gpus_per_node=2", "fsdp.dp_replicate=2"], marks=pytest.mark.slow),
        pytest.param(
            ["cluster.gpus_per_node=4", "rollout.tensor_parallel_size=2"], marks=pytest.mark.slow
        ),
        pytest.param(["cluster.gpus_per_node=2", "fsdp.ulysses_size=2"], marks=pytest.mark.slow),
    ],
    ids=["tp2", "dp2", "replicate2", "dp4-tp2", "ulysses2"],
)
def test_trains_on_several_workers(tmp_path, layout):
    with started(tmp_path / "run", *SMALL, *layout, "trainer.profile_steps=[2]") as run:
        output = run.ended()
        assert "traces of step 2" in output
        assert_traces(run, step=2, num_ranks=int(layout[0].partition("=")[2]))
        for row in run.metrics()[1:]:
            assert row["actor/first_log_ratio_max"] == 0.0
            assert row["rollout/log_prob_diff_mean"] < 1e-4


@pytest.mark.slow
def test_random_weights_need_no_checkpoint(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in EMBEDDED_FOLDER.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    own = [f"model.path={folder}", "model.init=random", "cluster.gpus_per_node=2"]
    with started(tmp_path / "run", *SMALL, *own) as run:
        output = run.output()
        assert run.process.returncode == 0, output
        assert "random weights" in output
        for row in run.metrics()[1:]:
            # As drawn, the model is nearly uniform over its 640 tokens.
            assert abs(row["actor/entropy"] - math.log(640)) < 0.2
            assert row["rollout/log_prob_diff_mean"] < 1e-4


@pytest.mark.slow
def test_the_tutorial_on_own_code_runs_as_written(tmp_path):
    page = (ROOT / "docs" / "tutorial_own_code.md").read_text()
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    for file, code in re.findall(r"`(my_\w+\.py)`:\n\n```python\n(.*?)```", page, re.DOTALL):
        (run_dir / file).write_text(code)
    [command] = re.findall(r"```\n(hybridrl .*?)```", page, re.DOTALL)
    recipe, *overrides = shlex.split(command.replace("\\\n", " "))[2:]
    own = [text for text in overrides if text.startswith(("+", "algorithm", "actor"))]
    with started(run_dir, recipe, *SMALL[1:], *own) as run:
        run.ended()
        for row in run.metrics()[1:]:
            assert row["actor/spring"] >= 0 and "actor/clip_fraction" not in row


@pytest.mark.slow
def test_the_extending_page_works_as_written(tmp_path):
    """Reward, estimator, loss and worker in one run, each from its file."""
    page = (ROOT / "docs" / "extending.md").read_text()
    pattern = r"`(my_\w+\.py)`:\n\n```python\n(.*?)```\n\n```\n(.*?)```"
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    given = ["algorithm=grpo"]
    for file, code, command in re.findall(pattern, page, re.DOTALL):
        if file != "my_environment.py":
            (run_dir / file).write_text(code)
            given += shlex.split(command.replace("\\\n", " "))[4:]
    with started(run_dir, *SMALL, *given, "cluster.gpus_per_node=2") as run:
        run.ended()
        manifest = json.loads((run.run_dir / "manifest.json").read_text())
        assert manifest["config"]["actor"]["worker"] == f"{run_dir}/my_actor.py:MyActor"
        assert manifest["config"]["algorithm"]["advantage"].startswith(f"{run_dir}/my_advantage.py")
        for row in run.metrics()[1:]:
            assert row["reward/part_words"] > 0 and row["actor/ratio_mean"] > 0
            assert "actor/clip_fraction" not in row
