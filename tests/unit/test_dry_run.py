"""A dry run of a resume: refused as the run itself, and it names the checkpoint."""

import fcntl

import pytest

import hybridrl
from hybridrl.app.before_start import before_start, compose_line
from hybridrl.app.lock import LOCK_FILE
from hybridrl.app.session import read_inputs
from hybridrl.config.command.command_line import parse_argv
from hybridrl.config.errors import ConfigError
from hybridrl.data.sources.prompts import examine_prompts
from hybridrl.plan.dry_run import dry_run
from tests.support.resume_cases import resumable

LINE = ["+recipe=gsm8k_grpo", "hardware=cpu", "data.num_eval_problems=8"]
DRY = [*LINE, "run.dry=true", "resume=auto"]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """The folder of a run with a checkpoint after step 4."""
    folder = tmp_path_factory.mktemp("dry") / "run"
    config = hybridrl.Trainer(LINE, folder=folder).config
    longest = config.rollout.max_prompt_tokens
    prompts, _ = examine_prompts(config.data, config.model, longest)
    inputs = read_inputs(config, folder, prompts)
    models = {key: dict(files) for key, files in inputs.models.items()}
    resumable(folder, config, models, inputs.source.fingerprint)
    return folder


def by_line(folder, *overrides):
    """As `hybridrl train` and `resume` do."""
    line = parse_argv([*DRY, f"hydra.run.dir={folder}", *overrides])
    assert before_start(line, compose_line(line), dry_run) is None


def by_python(folder, *overrides):
    hybridrl.train([*DRY, *overrides], folder=folder)


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.name != LOCK_FILE)


@pytest.mark.parametrize("start", [by_line, by_python])
def test_it_names_the_checkpoint_or_what_refuses_it(run_dir, start, capfd):
    before = files_of(run_dir)
    start(run_dir)
    plan = " ".join(capfd.readouterr().out.split())
    assert "step_00000004" in plan and "metrics continue after step 4" in plan
    assert "run.dry" not in plan.replace("Remove run.dry=true", "")
    with pytest.raises(ConfigError, match=r"actor\.optim\.lr = 0\.5, was 0"):
        start(run_dir, "actor.optim.lr=0.5")
    with pytest.raises(ConfigError, match="the newest of step 4"):
        start(run_dir, "resume=none")
    assert files_of(run_dir) == before


def test_a_run_that_is_still_going_on_refuses_it(run_dir):
    with (run_dir / LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="is in use by"):
            by_python(run_dir)


def test_without_a_checkpoint_it_says_so_and_leaves_nothing(tmp_path, capfd):
    by_line(tmp_path / "new")
    plan = " ".join(capfd.readouterr().out.split())
    assert "starts at step 0" in plan and not (tmp_path / "new").exists()
