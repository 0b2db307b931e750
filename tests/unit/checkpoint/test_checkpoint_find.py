"""The checkpoint that is taken up: by itself, or by the path that somebody typed."""

import os
import shutil
from functools import partial
from pathlib import Path

import pytest

from hybridrl.checkpoint import commit
from hybridrl.checkpoint.commit import quarantine
from hybridrl.checkpoint.verification import VerifiedCheckpoint, named, newest_good, verify
from hybridrl.config.errors import ConfigError
from tests.support.checkpoint_cases import SHARDS, save

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run with the checkpoints of steps 10, 20 and 30, and a manifest of its own."""
    run_dir = tmp_path_factory.mktemp("saved")
    (run_dir / "manifest.json").write_text("{}")
    for step in (10, 20, 30):
        save(run_dir, step)
    return run_dir


@pytest.fixture
def run_dir(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run")


@pytest.fixture
def folder(run_dir):
    return run_dir / "checkpoints"


def damage(folder: Path, step: int) -> None:
    os.truncate(folder / f"step_{step:08d}" / SHARDS[0], 5)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def refused(path: Path, **options) -> str:
    with pytest.raises(ConfigError) as caught:
        named(path, **options)
    return str(caught.value)


def test_a_run_without_checkpoints_has_none(tmp_path):
    assert newest_good(tmp_path) is None
    assert newest_good(tmp_path / "nowhere") is None
    commit.begin(tmp_path, 10)
    assert newest_good(tmp_path) is None


def test_the_newest_is_found(run_dir, folder):
    assert newest_good(run_dir) == VerifiedCheckpoint(
        folder / "step_00000030", verify(folder / "step_00000030")
    )


def test_steps_beyond_the_padding_are_newer(run_dir, folder):
    final = save(run_dir, 123_456_789)
    assert newest_good(run_dir).folder == final == folder / "step_123456789"


def test_looking_for_a_checkpoint_writes_nothing(run_dir, folder):
    (folder / ".step_00000040.partial").mkdir()
    before = names(folder)
    newest_good(run_dir)
    named(run_dir)
    assert names(folder) == before


def test_without_checksums_a_flipped_bit_goes_by(run_dir, folder):
    (folder / "step_00000030" / SHARDS[0]).write_bytes(bytes(4096))
    assert newest_good(run_dir, partial(verify, checksums=False)).manifest.step == 30
    found = newest_good(run_dir)
    assert (found.manifest.step, len(found.damaged)) == (20, 1)


@pytest.mark.parametrize(
    ("path", "step"),
    [
        (".", 30),
        ("checkpoints", 30),
        ("checkpoints/", 30),
        ("checkpoints/step_00000010", 10),
        ("checkpoints/../checkpoints/step_00000020/", 20),
    ],
)
def test_a_path_means_a_checkpoint(run_dir, path, step):
    assert named(run_dir / path).manifest.step == step


def test_a_path_may_be_relative_a_link_or_a_copy(run_dir, folder, monkeypatch):
    monkeypatch.chdir(folder / "step_00000020")
    assert named(Path(".")).manifest.step == 20
    (run_dir / "best").symlink_to(folder / "step_00000010")
    assert named(run_dir / "best").manifest.step == 10
    shutil.copytree(folder / "step_00000010", run_dir / "my_copy")
    assert named(run_dir / "my_copy").manifest.step == 10


def test_the_home_folder_may_be_a_tilde(run_dir, monkeypatch):
    monkeypatch.setenv("HOME", str(run_dir))
    assert named(Path("~")).manifest.step == 30


def test_a_run_directory_falls_back_and_a_named_checkpoint_does_not(run_dir, folder):
    damage(folder, 30)
    found = named(run_dir)
    assert (found.manifest.step, found.damaged[0].file) == (20, SHARDS[0])
    text = refused(folder / "step_00000030")
    assert f"resume = {folder / 'step_00000030'}: this checkpoint is damaged" in text
    assert f"{SHARDS[0]} has 5 bytes, the manifest says 4,096.\n" in text
    assert "Name another one, or the run's directory" in text


def test_a_checkpoint_that_lost_its_manifest_is_damaged_not_unknown(folder):
    (folder / "step_00000030" / "manifest.json").unlink()
    text = refused(folder / "step_00000030")
    assert "this checkpoint is damaged: manifest.json is missing.\n" in text


def test_paths_without_a_checkpoint_say_what_is_there_and_what_to_type(run_dir, folder, tmp_path):
    expected = "Expected a checkpoint, as in export=<run>/checkpoints/step_00000020, or a run's"
    cases = {
        tmp_path / "nowhere": "nowhere: this does not exist",
        run_dir / "manifest.json": "manifest.json: this is a file, not a folder",
        tmp_path: "this is a folder, and it has no step_...",
    }
    for path, says in cases.items():
        text = refused(path, key="export")
        assert f"export = {path}" in text and says in text and expected in text
    for step in (10, 20, 30):
        shutil.rmtree(folder / f"step_{step:08d}")
    assert "this is a folder, and checkpoints/ in it has no step_..." in refused(run_dir)


def test_damaged_ones_are_set_aside_so_that_later_saves_take_their_names(run_dir, folder):
    damage(folder, 30)
    found = newest_good(run_dir)
    assert quarantine(run_dir, found) == [folder / "damaged_step_00000030"]
    assert newest_good(run_dir) == VerifiedCheckpoint(found.folder, found.manifest)
    save(run_dir, 30)
    damage(folder, 30)
    again = quarantine(run_dir, newest_good(run_dir))
    assert again == [folder / "damaged_step_00000030.2"]
    kept = ["damaged_step_00000030", "damaged_step_00000030.2"]
    assert names(folder) == [*kept, "step_00000010", "step_00000020"]


def test_whole_later_ones_are_set_aside_where_an_older_one_was_named(run_dir, folder):
    found = named(folder / "step_00000010")
    moved = quarantine(run_dir, found)
    assert [path.name for path in moved] == [
        "superseded_step_00000020",
        "superseded_step_00000030",
    ]
    assert verify(moved[1]).step == 30
    assert named(moved[1]).manifest.step == 30
    assert newest_good(run_dir).manifest.step == 10


def test_with_nothing_newer_nothing_is_set_aside(run_dir, folder):
    before = names(folder)
    assert quarantine(run_dir, newest_good(run_dir)) == []
    assert names(folder) == before


def test_a_course_from_another_run_sets_later_steps_aside(run_dir, folder, tmp_path):
    save(tmp_path / "run", 5)
    other = tmp_path / "other"
    other.mkdir()
    save(other, 3)
    quarantine(run_dir, named(other))
    assert newest_good(run_dir) is None


def test_a_course_from_a_copy_sets_the_same_step_aside_so_that_it_can_be_saved(run_dir, folder):
    mine = Path(shutil.copytree(folder / "step_00000020", folder / "my_copy"))
    moved = quarantine(run_dir, named(mine))
    assert [path.name for path in moved] == [
        "superseded_step_00000020",
        "superseded_step_00000030",
    ]
    assert save(run_dir, 20) == folder / "step_00000020"
    assert verify(mine).step == 20
