"""How the commands beside training end, and what becomes of a folder that goes meanwhile."""

import errno
import fcntl
import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from hybridrl import cli
from hybridrl.app.process import exit_codes, set_up_process
from hybridrl.checkpoint.manifest import DamagedCheckpoint
from hybridrl.checkpoint.verification import UnreadableCheckpoint, VerifiedCheckpoint
from hybridrl.commands import check, init, resume, runs
from hybridrl.commands.evaluation import session
from hybridrl.commands.evaluation.session import Totals
from hybridrl.commands.running import (
    UsageError,
    checkpoint_at,
    report_removal,
    run_command,
    warn_about_changed_model,
)
from hybridrl.config.errors import ConfigError
from hybridrl.controller.errors import WorkerError
from hybridrl.controller.ray import runtime
from hybridrl.controller.signals import Interrupted, Preempted
from hybridrl.data.sources.prompts import Prompt, PromptSets
from hybridrl.doctor.ray import ray_facts
from hybridrl.main import _how_to_resume
from hybridrl.models.fingerprints import trained_model
from hybridrl.models.resolve import resolve_model
from hybridrl.trainer.checkpointing import verification
from tests.support.checkpoint_cases import save
from tests.support.role_configs import model_config
from tests.support.run_configs import run_config


@pytest.fixture
def own_process(monkeypatch) -> Iterator[None]:
    """Puts back what a command sets for its whole process."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(os, "environ", os.environ.copy())
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.usefixtures("own_process")
def test_damage_that_shows_late_is_told_as_other_damage(tmp_path, capsys):
    def command() -> None:
        raise DamagedCheckpoint(tmp_path, "state", "has only parts of actor.weights.x")

    with pytest.raises(SystemExit) as end:
        run_command(command)
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("ConfigError: 1 problem on the command line")
    assert f"{tmp_path}: state has only parts of actor.weights.x" in said


@pytest.mark.usefixtures("own_process")
def test_a_full_disk_is_told_in_one_line(capsys):
    with pytest.raises(SystemExit) as end:
        run_command(lambda: Path("/dev/full").write_text("x"))
    assert end.value.code == 1
    assert re.fullmatch(r".*No space left on device.*\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (ConfigError("x = 1 found"), 2, "ConfigError: 1 problem in the config\n- x = 1 found\n"),
        (UsageError("no such flag"), 2, "UsageError: 1 problem on the command line"),
        (WorkerError([3], "actor.update", "rank 3 died"), 1, "rank 3 died"),
        (KeyboardInterrupt(), 130, "Stopped by SIGINT\n"),
        (Interrupted(signal.SIGTERM), 143, "Stopped by SIGTERM\n"),
        (
            Preempted(signal.SIGTERM, Path("x/step_4")),
            75,
            "Stopped by SIGTERM; resume from x/step_4\n",
        ),
        (Preempted(signal.SIGHUP, None), 129, "Stopped by SIGHUP\n"),
    ],
)
def test_every_end_has_its_exit_code(error, code, told, capsys):
    with pytest.raises(SystemExit) as end, exit_codes():
        raise error
    assert end.value.code == code
    assert told in capsys.readouterr().err


def test_a_stopped_run_names_its_newest_checkpoint(tmp_path):
    stopped = Interrupted(signal.SIGINT)
    stopped.how_to_resume = _how_to_resume(tmp_path)
    assert str(stopped) == "Stopped by SIGINT; there is no checkpoint to resume from"
    newest = [save(tmp_path, step) for step in (20, 100)][-1]
    stopped.how_to_resume = _how_to_resume(tmp_path)
    assert str(stopped) == f"Stopped by SIGINT; resume from {newest}"


def test_a_misspelt_command_is_named(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["hybridrl", "trian"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert (end.value.code, capsys.readouterr().err) == (
        2,
        "no command trian. Did you mean train?\n",
    )


@pytest.mark.parametrize("command", [resume, runs])
def test_a_current_directory_that_was_removed_is_told(
    command, own_process, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["hybridrl", "latest"])
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(SystemExit) as end:
        command.main()
    assert end.value.code == 2
    assert "The current directory was removed.\n" in capsys.readouterr().err


@pytest.mark.parametrize("at", ["directory", "argument"])
def test_a_path_that_is_not_utf8_is_named(at, own_process, tmp_path, monkeypatch, capsys):
    """Ray cannot start there, and safetensors opens no file there."""
    folder = Path(os.fsdecode(b"caf\xe9"))
    monkeypatch.chdir(tmp_path)
    folder.mkdir()
    monkeypatch.setattr(sys, "argv", ["hybridrl", "." if at == "directory" else str(folder)])
    if at == "directory":
        monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as end:
        runs.main()
    assert end.value.code == 2
    assert re.search(r"caf.*: this is not UTF-8\.\n", capsys.readouterr().err)


def test_the_user_is_told_how_far_a_long_verification_is(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(verification, "FIRST_S", 0.0)
    folder = save(tmp_path, 20)
    assert checkpoint_at(tmp_path).folder == folder
    assert capsys.readouterr().err.startswith(f"Verifying {folder}: ")


def test_a_path_that_the_disk_does_not_let_be_looked_at_is_told(tmp_path):
    path = tmp_path / ("x" * 256)
    said = re.escape(f"{path} cannot be read: File name too long (ENAMETOOLONG)")
    with pytest.raises(UnreadableCheckpoint, match=said):
        checkpoint_at(path)


def test_a_model_with_other_files_than_the_run_had_is_told(tmp_path, capsys):
    """Weights count for adapters alone; without these they need not even be there."""
    folder = Path(shutil.copytree(resolve_model("embedded"), tmp_path / "model"))
    model = model_config(folder)
    whole = checkpoint_at(save(tmp_path, 20))
    manifest = replace(whole.manifest, models=trained_model(model, weights=True))
    whole = replace(whole, manifest=replace(manifest, config={"lora": None}))
    adapters = replace(whole, manifest=replace(manifest, config={"lora": {"rank": 4}}))

    def told(found: VerifiedCheckpoint) -> str:
        warn_about_changed_model(found, model)
        return capsys.readouterr().err

    said = f"{model.path} has changed since {whole.folder} was trained: "
    assert told(whole) == told(adapters) == ""
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert told(adapters).startswith(f"{said}model.safetensors changed")
    weights.unlink()
    assert told(whole) == ""
    (folder / "tokenizer.json").write_text("{}")
    assert told(whole).startswith(f"{said}tokenizer.json changed")


def test_a_folder_that_goes_while_it_is_read_is_told_so(tmp_path):
    folder = tmp_path / "step_00000020"
    folder.mkdir()
    gone = rf"{folder} was removed meanwhile \(checkpoint\.keep_last\)"
    with pytest.raises(ConfigError, match=gone), report_removal(folder):
        shutil.rmtree(folder)
        (folder / "state").stat()


def test_a_failure_with_the_folder_in_its_place_stays_what_it_is(tmp_path):
    with pytest.raises(RuntimeError, match="mine"), report_removal(tmp_path):
        raise RuntimeError("mine")


@pytest.mark.parametrize(
    ("users", "kept"), [({}, "passive"), ({"OMP_WAIT_POLICY": "active"}, "active")]
)
def test_threads_that_wait_sleep_on_a_busy_machine_unless_the_user_chose(
    own_process, monkeypatch, tmp_path, users, kept
):
    loops = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count())
    ]
    monkeypatch.setattr(os, "environ", {"HYBRIDRL_CACHE": str(tmp_path)} | users)
    try:
        time.sleep(0.5)
        set_up_process()
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    assert os.environ["OMP_WAIT_POLICY"] == kept


def test_compiled_kernels_are_kept_in_the_cache_but_where_the_user_says(
    own_process, monkeypatch, tmp_path
):
    monkeypatch.setattr(os, "environ", {"HYBRIDRL_CACHE": str(tmp_path), "TRITON_CACHE_DIR": "/t"})
    set_up_process()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "torchinductor")
    assert os.environ["TRITON_CACHE_DIR"] == "/t"
    del os.environ["TRITON_CACHE_DIR"]
    set_up_process()
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "triton")
    assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "1"


def test_a_user_without_a_home_directory_is_told_to_name_the_cache(
    own_process, monkeypatch, tmp_path
):
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(pwd, "getpwuid", Mock(side_effect=KeyError))
    with pytest.raises(ConfigError, match="HYBRIDRL_CACHE=<a folder>"):
        set_up_process()
    assert ray_facts(None).token == ""


def test_flash_attentions_cache_is_off_where_files_cannot_be_locked(
    own_process, monkeypatch, tmp_path
):
    monkeypatch.setattr(os, "environ", {"HYBRIDRL_CACHE": str(tmp_path)})
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOSYS, "no locks")))
    set_up_process()
    assert "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED" not in os.environ


def test_a_task_is_not_named_like_a_recipe_which_would_hide_it(tmp_path):
    with pytest.raises(UsageError, match="hybridrl has a recipe of this name"):
        init._write(tmp_path / "gsm8k_ppo")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(("samples", "advises"), [(1, False), (2, True)])
def test_equal_rewards_are_no_problem_where_each_prompt_has_one(samples, advises, monkeypatch):
    scores = {"": [[1.0] * samples, [0.0] * samples]}
    rows = [
        {"problem": n, "prompt": "Say\n" * 99, "response": "x" * 500, "length": 7}
        | {"scores": {"reward": reward}}
        for n, of_problem in enumerate(scores[""])
        for reward in of_problem
    ]

    def evaluate(evaluation, _):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (evaluation.output / session.COMPLETIONS).write_text(text)
        return Totals(scores)

    monkeypatch.setattr(session, "evaluate", evaluate)
    monkeypatch.setattr(runtime, "ray_runtime", lambda *_: nullcontext())
    config = run_config(f"rollout.responses_per_prompt={samples}", "actor.mini_batch_size=1")
    lines = "\n".join(check._solve_lines(PromptSets([], [], []), config))
    assert ("would learn nothing" in lines) == advises
    assert "reward 1, 7 tokens" in lines and "reward 0, 7 tokens" in lines
    assert f"'{'x' * 400}...'" in lines


def test_check_measures_the_answers_that_fine_tuning_trains_on():
    """Those of data.solution_key, with their end token, which may be far longer than the answer."""
    prompt = Prompt(0, [5], "", "", {"answer": "4"}, {}, answer_ids=[7] * 60)
    sets = PromptSets([prompt], [prompt], [])
    answers = [*check._length_lines(sets, Mock(), run_config("rollout.max_response_tokens=48"))][1]
    assert answers.startswith("answers: median 60, longest 60 tokens")
    assert answers.endswith("rollout.max_response_tokens = 48, which 2 exceed")


def test_check_refuses_a_recipes_keys_without_effect_as_training_does(tmp_path):
    (tmp_path / "recipe").mkdir()
    own = "# @package _global_\ndata: {solution_key: answer}\n"
    (tmp_path / "recipe" / "mine.yaml").write_text(own)
    with pytest.raises(ConfigError, match=r"data\.solution_key: no effect"):
        check._check(["--config-dir", str(tmp_path), "+recipe=mine", "--no-samples"])
