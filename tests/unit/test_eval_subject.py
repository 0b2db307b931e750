"""What the path of hybridrl eval means."""

from pathlib import Path

import pytest

from hybridrl.checkpoint.commit import begin, commit
from hybridrl.checkpoint.manifest import Manifest
from hybridrl.commands.evaluation.subject import find_subject, safe_name
from hybridrl.config.errors import ConfigError


@pytest.mark.parametrize("name", ["embedded", "Qwen/Qwen2.5-0.5B-Instruct"])
def test_what_is_no_path_is_a_models_name(name):
    subject = find_subject(name)
    assert (subject.model, subject.name) == (name, name.split("/")[-1])
    assert (subject.step, subject.folder) == (0, None)


@pytest.mark.parametrize("path", ["outputs/lates", "multirun/x", "./x", "../x/y", "/nowhere"])
def test_a_path_that_does_not_exist_is_no_models_name(path):
    with pytest.raises(ConfigError, match="there is no such run or folder"):
        find_subject(path)


def test_folder_with_a_config_is_a_model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert find_subject(str(tmp_path)).model == str(tmp_path)


def test_other_folders_are_refused_with_what_was_expected(tmp_path):
    with pytest.raises(ConfigError, match="neither a checkpoint, nor the directory of a run"):
        find_subject(str(tmp_path))


@pytest.mark.parametrize("inside", ["", "checkpoints"])
def test_run_without_a_checkpoint_is_told_so(tmp_path, inside):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match=r"on the command line(.|\n)*has no step_"):
        find_subject(str(tmp_path / inside))


def test_damaged_checkpoint_is_told_with_the_file(tmp_path):
    folder = tmp_path / "checkpoints" / "step_00000020"
    (folder / "state").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"manifest\.json is missing"):
        find_subject(str(folder))
    with pytest.raises(ConfigError, match=r"manifest\.json is missing"):
        find_subject(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gsm8k_ppo-2.b", "gsm8k_ppo-2.b"),
        ("../../x", "_.._x"),
        ("/abs/x", "_abs_x"),
        ("..", "model"),
        ("", "model"),
        ("a\n\0b", "a_b"),
        ("x" * 300, "x" * 100),
    ],
)
def test_a_name_of_others_is_one_component_of_a_path(name, expected):
    assert safe_name(name) == expected


@pytest.mark.parametrize("name", ["../../x", "/abs/x"])
def test_a_runs_name_leads_to_no_other_folder(tmp_path, name):
    folder = begin(tmp_path, 20)
    created = "2026-01-01T00:00:00+00:00"
    commit(folder, Manifest(20, created, {"run": {"name": name}}, {}, 1, {}, {}, {}))
    subject = find_subject(str(tmp_path))
    assert Path("evals", subject.name).resolve().parent == Path("evals").resolve()
    assert subject.name.endswith("x_step_20")
