"""Killed runs go on as if they had not been, and what cannot be gone on from is refused."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from unittest.mock import Mock

import pytest

from hybridrl.app import launch
from hybridrl.app.runs import RESULT_FILE
from hybridrl.app.session import RunInputs, read_inputs
from hybridrl.checkpoint import manifest as manifests
from hybridrl.checkpoint.files import DRIVER, STATE, checkpoints_folder, step_of
from hybridrl.checkpoint.verification import NoWholeCheckpoint, Verify
from hybridrl.config.errors import ConfigError
from hybridrl.config.schema import RunConfig
from hybridrl.data.sources.prompts import PromptSets, examine_prompts
from hybridrl.models.resolve import EMBEDDED_FOLDER, FINAL
from hybridrl.trainer.checkpointing.resume import Resume
from hybridrl.trainer.tracking.provenance import versions
from hybridrl.trainer.tracking.tracker import METRICS_FILE
from tests.support.checkpoint_cases import flip_one_bit, huge_checkpoint
from tests.support.kill_and_resume import (
    EVERYTHING,
    STEPS,
    TIMED,
    WORKER,
    Kill,
    Timeline,
    assert_same_end,
    draw_kill,
    finished,
    kill,
    steps_logged,
    undisturbed,
    untimed_rows,
    wait_until,
)
from tests.support.metric_names import explained
from tests.support.run_configs import run_config
from tests.support.runs import ROOT, SMALL, launched, started

# Two files of tests run at once.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
CONFIG = [key for key in EVERYTHING if not key.startswith(("+recipe=", "hardware="))]


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> tuple[Path, Timeline]:
    """An undisturbed run, watched."""
    run_dir = tmp_path_factory.mktemp("reference") / "run"
    return run_dir, undisturbed(run_dir, *EVERYTHING, env=ONE_THREAD)


@pytest.fixture
def copied(reference, tmp_path) -> Path:
    """The undisturbed run's directory, to be spoiled."""
    return Path(shutil.copytree(reference[0], tmp_path / "run"))


def steps_in(run_dir: Path) -> list[int]:
    """Steps of the checkpoints, rising."""
    names = [path.name for path in checkpoints_folder(run_dir).iterdir()]
    return sorted(step for step in map(step_of, names) if step is not None)


def spoil(run_dir: Path, step: int) -> str:
    """Damage a checkpoint's tensors; the file's path in the checkpoint."""
    folder = checkpoints_folder(run_dir) / f"step_{step:08d}"
    file = next((folder / STATE).iterdir())
    flip_one_bit(file)
    return str(file.relative_to(folder))


def refused(run_dir: Path, *overrides: str) -> str:
    """What a run that exits with code 2 prints, on one line."""
    with started(run_dir, *overrides) as run:
        output = run.ended(2)
    assert "Traceback" not in output
    return " ".join(output.split())


def prompts_of(config: RunConfig) -> PromptSets:
    """The prompts that a config names."""
    limit = config.rollout.max_prompt_tokens
    prompts, problems = examine_prompts(config.data, config.model, limit)
    assert prompts is not None and not problems
    return prompts


def taken_up(config: RunConfig, run_dir: Path) -> Resume | None:
    """What a run with this config goes on from."""
    return read_inputs(config, run_dir, prompts_of(config)).resume


def two_kills(timeline: Timeline) -> tuple[Kill, Kill]:
    """The last two of the thirty, a worker's and then the driver's, with a save, two steps apart.

    Closer ones would take rows of the start before for those that a kill waits for. Late ones leave
    two checkpoints, of which the test damages one.
    """
    plans = sorted((draw_kill(timeline, seed) for seed in range(30)), key=lambda plan: plan.step)
    found = next(
        (
            (first, second)
            for second, first in combinations(reversed(plans), 2)
            if (first.victim, second.victim) == ("worker", "driver")
            and (first.saving or second.saving)
            and second.step - first.step >= 2
        ),
        None,
    )
    assert found is not None, f"no two instants, one amid a save, among {plans}"
    return found


@pytest.mark.timeout(900)  # three starts; beside other tests on a slow machine minutes
@pytest.mark.parametrize("kills", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_run_ends_like_the_undisturbed_one(reference, tmp_path, kills):
    """It is resumed after the driver's kill; before, it restarts without a worker's process.

    Then the newest checkpoint is damaged, too: the one before is as good. Unlike the
    reference it records no tokens: the forward pass for them changes no number.
    """
    run_dir, timeline = reference
    untold = [*EVERYTHING, "tracking.token_samples=0"]
    with started(tmp_path, *untold, "trainer.max_restarts=1", env=ONE_THREAD) as run:
        for each in two_kills(timeline)[-kills:]:
            kill(run, each)
        assert run.process.wait() == -signal.SIGKILL
        output = run.process.stdout.read()  # ends with the last of the run's processes
        anew = re.findall("starts anew from step [0-9]+: restart 1 of 1", output)
        assert len(anew) == output.count("its process died") == kills - 1, output
        run.assert_nothing_left()
    *_, before, newest = steps_in(tmp_path)
    file = spoil(tmp_path, newest)
    output = " ".join(finished(tmp_path, *untold, env=ONE_THREAD).split())
    assert f"step_{newest:08d}: {file} has the sha256" in output, output
    assert f"step_{before:08d}: step {before}, of" in output, output
    assert (checkpoints_folder(tmp_path) / f"damaged_step_{newest:08d}" / file).is_file()
    assert_same_end(tmp_path, run_dir)


def test_a_damaged_checkpoint_is_passed_over_by_name(copied):
    before, newest = steps_in(copied)
    file = spoil(copied, newest)
    config = run_config(*CONFIG)
    resume = taken_up(config, copied)
    assert resume.state.step == before
    assert [row["step"] for row in resume.rows] == list(range(before + 1))
    assert any(f"step_{newest:08d}: {file} has the sha256" in note for note in resume.notes)


def test_where_all_are_damaged_each_is_named(copied):
    for step in steps_in(copied):
        flip_one_bit(checkpoints_folder(copied) / f"step_{step:08d}" / DRIVER)
    with pytest.raises(NoWholeCheckpoint) as caught:
        taken_up(run_config(*CONFIG), copied)
    for step in steps_in(copied):
        assert f"step_{step:08d}: {DRIVER} has the sha256" in str(caught.value)


def test_changes_of_what_is_computed_are_listed_and_must_be_allowed(reference):
    changed = [*CONFIG, "actor.optim.lr=0.5", "actor.epochs=2", "cluster.gpus_per_node=2"]
    with pytest.raises(ConfigError) as caught:
        taken_up(run_config(*changed), reference[0])
    for told in ("actor.optim.lr = 0.5, was 0.0001", "actor.epochs = 2, was 1"):
        assert told in str(caught.value)
    assert "gpus_per_node" not in str(caught.value)
    config = run_config(*changed, "checkpoint.allow_config_changes=true")
    resume = taken_up(config, reference[0])
    allowed, free = resume.notes[-2:]
    assert allowed.startswith("changed, as allowed: ") and "actor.epochs = 2, was 1" in allowed
    assert "cluster.gpus_per_node = 2, was 1" in free


def test_other_files_of_the_model_must_be_allowed_and_the_same_elsewhere_need_not(
    reference, tmp_path
):
    """The reference would be another one, and so would what adapters are added to."""
    model = Path(shutil.copytree(EMBEDDED_FOLDER, tmp_path / "model"))
    config = run_config(*CONFIG, f"model.path={model}")
    told = taken_up(config, reference[0]).notes[-1]
    moved = f"model.path = {model}, was embedded"
    assert told.startswith("changed, without effect on the results: ") and moved in told
    flip_one_bit(model / "model.safetensors")
    others = f"model.path = {model} (other files: model.safetensors), was embedded"
    with pytest.raises(ConfigError, match=re.escape(others)):
        taken_up(config, reference[0])
    config.checkpoint.allow_config_changes = True
    (allowed,) = (note for note in taken_up(config, reference[0]).notes if "model.path" in note)
    assert allowed == f"changed, as allowed: {others}"


def test_other_training_prompts_must_be_allowed(copied):
    config = run_config(*CONFIG)
    prompts = prompts_of(config)
    others = replace(prompts, train=prompts.train[1:])
    with pytest.raises(ConfigError, match="data: other training prompts"):
        read_inputs(config, copied, others)
    config.checkpoint.allow_config_changes = True
    notes = read_inputs(config, copied, others).resume.notes
    assert any(note.startswith("changed, as allowed: data: other training") for note in notes)


def test_another_answer_to_a_training_prompt_must_be_allowed(copied):
    """No prompt shows it, but it is what responses are rewarded by."""
    config = run_config(*CONFIG)
    prompts = prompts_of(config)
    first, *rest = prompts.train
    first = replace(first, example=first.example | {"answer": "-1"})
    with pytest.raises(ConfigError, match="data: other answers or other columns") as caught:
        read_inputs(config, copied, replace(prompts, train=[first, *rest]))
    assert "other training prompts" not in str(caught.value)


def test_metrics_that_a_power_cut_spoilt_end_before_the_first_such_line(copied, caplog):
    path = copied / METRICS_FILE
    first, second, _, *others = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([first, second, b"\0" * 99 + b"\n", *others]))
    resume = taken_up(run_config(*CONFIG), copied)
    assert [row["step"] for row in resume.rows] == [0, 1]
    assert f"{METRICS_FILE}: line 3 of" in caplog.text
    lacking = f"{METRICS_FILE} lacks {resume.state.step - 1} of these steps, from 2 on"
    assert lacking in resume.notes


def test_other_versions_are_told_and_refuse_nothing(copied):
    config, now = run_config(*CONFIG), versions()
    assert not any("versions" in note for note in taken_up(config, copied).notes)
    folder = checkpoints_folder(copied) / f"step_{steps_in(copied)[-1]:08d}"
    before = {name: number for name, number in now.items() if name != "numpy"} | {"torch": "1.0"}
    manifests.write(folder, replace(manifests.read(folder), versions=before))
    told = f"numpy (not there) then, {now['numpy']} now; torch 1.0 then, {now['torch']} now"
    assert taken_up(config, copied).notes[-1] == f"other versions: {told}"


def test_nothing_is_set_aside_before_the_run_is_sure_to_begin(copied):
    """What a checkpoint is taken from is known while Ray starts, which may refuse the run."""
    first, last = steps_in(copied)
    folder = checkpoints_folder(copied)
    before = sorted(folder.iterdir())
    resume = taken_up(run_config(*CONFIG, f"resume={folder / f'step_{first:08d}'}"), copied)
    assert sorted(folder.iterdir()) == before
    resume.quarantine(copied)
    assert steps_in(copied) == [first]
    assert (folder / f"superseded_step_{last:08d}").is_dir()


def test_a_new_run_does_not_mix_with_an_old_one(reference):
    with pytest.raises(ConfigError, match=f"the newest of step {STEPS}.*\n.*resume=auto"):
        taken_up(run_config(*CONFIG, "resume=none"), reference[0])


def test_a_finished_run_has_nothing_left_to_do(copied, monkeypatch):
    """Neither Ray nor a worker starts, unless its end was not reached or its model is not there."""

    def inputs(result: Mock, folder: Path, verify: Verify) -> RunInputs:
        return read_inputs(result.config, folder, prompts_of(result.config), verify)

    monkeypatch.setattr(launch, "_prepare_session", inputs)
    result = Mock(config=run_config(*CONFIG))
    done = launch._finished(result, copied)
    assert done is not None and done.step == STEPS == done.metrics["step"]
    assert f"all {STEPS} steps are done" in " ".join(taken_up(result.config, copied).notes)
    longer = run_config(
        *CONFIG, f"trainer.total_steps={STEPS + 1}", "checkpoint.allow_config_changes=true"
    )
    assert launch._finished(Mock(config=longer), copied) is None
    assert "steps are done" not in " ".join(taken_up(longer, copied).notes)
    result.config.trainer.save_final_model = True
    assert launch._finished(result, copied) is None
    (copied / FINAL).mkdir()
    assert launch._finished(result, copied) is not None
    spoil(copied, STEPS)
    assert launch._finished(result, copied) is None
    (copied / RESULT_FILE).unlink()
    assert launch._finished(result, copied) is None


@pytest.mark.slow
def test_the_command_refuses_with_code_2(reference, copied, tmp_path):
    files = [*(reference[0] / ".hydra").iterdir()]
    before = [file.read_bytes() for file in files]
    for step in steps_in(copied):
        spoil(copied, step)
    told = refused(copied, *EVERYTHING)
    assert all(f"step_{step:08d}: state/shard" in told for step in steps_in(copied)), told
    told = refused(reference[0], *EVERYTHING, "actor.optim.lr=0.5")
    assert "actor.optim.lr = 0.5, was 0.0001" in told
    assert "resume=auto" in refused(reference[0], *EVERYTHING, "resume=none")
    model = Path(shutil.copytree(EMBEDDED_FOLDER, tmp_path / "model"))
    flip_one_bit(model / "model.safetensors")
    told = refused(reference[0], *EVERYTHING, f"model.path={model}")
    assert "(other files: model.safetensors), was embedded" in told
    assert before == [file.read_bytes() for file in files] != []


@pytest.mark.slow
def test_the_command_does_nothing_to_a_finished_run_but_says_so(copied, reference, tmp_path):
    """Also without being typed again, and from another directory."""
    with launched(tmp_path / "x", "hybridrl.cli", "resume", str(copied), env=ONE_THREAD) as run:
        output = run.output()
    assert f"all {STEPS} steps are done" in " ".join(output.split()), output
    assert f"step {STEPS}/{STEPS}" not in output and "-- workers" not in output
    assert_same_end(copied, reference[0])
    assert (copied / "metrics.jsonl").read_bytes() == (reference[0] / "metrics.jsonl").read_bytes()


@pytest.mark.slow
def test_another_directory_takes_metrics_over(reference, tmp_path):
    """From the checkpoint before the last, with a longer course, which this config allows."""
    source = checkpoints_folder(reference[0]) / f"step_{steps_in(reference[0])[0]:08d}"
    overrides = [*EVERYTHING, f"resume={source}"]
    taken = step_of(source.name)
    finished(tmp_path / "new", *overrides, env=ONE_THREAD)
    assert_same_end(tmp_path / "new", reference[0], after=taken)
    changed = [*overrides, "actor.epochs=2", "checkpoint.allow_config_changes=true"]
    output = finished(tmp_path / "changed", *changed, env=ONE_THREAD)
    assert "changed, as allowed: actor.epochs = 2, was 1" in " ".join(output.split()), output
    rows, wanted = untimed_rows(tmp_path / "changed"), untimed_rows(reference[0])
    assert rows[: taken + 1] == wanted[: taken + 1] and rows[-1] != wanted[-1]


def test_metrics_of_a_run_with_its_checkpoints_on_another_disk_are_taken_over(copied, tmp_path):
    checkpoints_folder(copied).rename(tmp_path / "disk")
    checkpoints_folder(copied).symlink_to(tmp_path / "disk")
    resume = taken_up(run_config(*CONFIG, f"resume={copied}"), tmp_path / "new")
    assert [row["step"] for row in resume.rows] == [*range(resume.state.step + 1)]


@pytest.mark.slow
def test_a_restart_before_the_first_own_checkpoint_begins_where_the_run_began(reference, tmp_path):
    taken = steps_in(reference[0])[0]
    source = checkpoints_folder(reference[0]) / f"step_{taken:08d}"
    overrides = [*EVERYTHING, f"resume={source}", "trainer.max_restarts=1"]
    with started(tmp_path, *overrides, env=ONE_THREAD) as run:
        wait_until(lambda: steps_logged(tmp_path) > taken + 1, f"step {taken + 1}", run)
        (worker,) = [pid for pid, title in run.processes().items() if WORKER in title]
        assert not checkpoints_folder(tmp_path).is_dir() or not steps_in(tmp_path)
        os.kill(worker, signal.SIGKILL)
        output = run.output()
    assert run.process.returncode == 0, output
    assert "The run starts anew" in output
    assert_same_end(tmp_path, reference[0], after=taken)


@pytest.mark.slow
def test_sigterm_does_not_wait_for_a_checkpoint_to_be_verified(tmp_path):
    """Another thread does that, beginning while Ray starts; here it would take half a minute."""
    huge = huge_checkpoint(tmp_path / "old")
    run_dir = tmp_path / "new"
    with started(run_dir, *SMALL, f"resume={huge}") as run:
        logged = lambda: "".join(path.read_text() for path in run_dir.glob("*.log"))  # noqa: E731
        wait_until(lambda: f"Verifying {huge}: " in logged(), "a line of the verification", run)
        run.process.terminate()
        start = time.monotonic()
        output = run.output(timeout=60)
        assert time.monotonic() - start < 10
        assert run.process.returncode == 143, output
        assert "Traceback" not in output
        run.assert_nothing_left()


def test_auto_needs_a_directory(tmp_path):
    """Without one each start would be a new run, in silence."""
    dry = [*SMALL, "run.dry=true", "resume=auto"]
    call = [sys.executable, "-m", "hybridrl.main", *dry]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(call, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "resume = auto: hydra.run.dir is not" in ended.stderr


def test_victims_alternate_and_instants_are_spread():
    timeline = Timeline({0: 0.0, 1: 1.0, 2: 5.0}, {"first": 0.0}, [])
    plans = [draw_kill(timeline, seed) for seed in range(30)]
    assert [plan.victim for plan in plans] == ["driver", "worker"] * 15
    assert min(plan.share for plan in plans) < 0.2 and max(plan.share for plan in plans) > 0.8
    assert [plan.share for plan in plans] == [random.Random(seed).random() for seed in range(30)]


def test_times_and_rates_are_what_a_clock_decides():
    """Of all that docs/metrics.md explains; everything else is compared bit for bit."""
    names = [re.sub(r"[<>]", "", name) for name in explained()]
    timed = [name for name in names if TIMED.fullmatch(name)]
    by_unit = [name for name in timed if name.endswith(("_s", "/seconds"))]
    assert {"time/step_s", "idle/rankk_s", "setup/total_s", "reward/seconds"} < set(by_unit)
    assert sorted(set(timed) - set(by_unit)) == [
        "idle/fraction",
        "mfu/old_log_probs",
        "mfu/ref_log_probs",
        "mfu/update_actor",
        "rollout/engine_tokens_per_second_which",
        "rollout/slowest_engine",
        "rollout/tokens_per_second",
        "tokens_per_s/phase",
    ]
    groups = "checkpoint environment idle reshard reward rollout setup split time"
    assert {name.partition("/")[0] for name in by_unit} <= set(groups.split())
