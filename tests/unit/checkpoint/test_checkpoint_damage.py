"""Every file of a checkpoint damaged in every way: named, and the one before is taken up."""

import dataclasses
import os
import pickle
import shutil
from pathlib import Path

import pytest

from hybridrl.checkpoint import manifest as manifests
from hybridrl.checkpoint.manifest import DamagedCheckpoint
from hybridrl.checkpoint.verification import NoWholeCheckpoint, digest, newest_good, verify
from tests.support.checkpoint_cases import FILES, SHARDS, SIZE, flip_one_bit, save

pytestmark = pytest.mark.full


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 4)


def lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


def link_out(file: Path) -> None:
    """A link to the same bytes outside the folder."""
    outside = file.parents[2] / "outside"
    shutil.move(file, outside)
    file.symlink_to(outside)


def make_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def make_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


DAMAGES = (truncate, lengthen, flip_one_bit, Path.unlink, link_out, make_folder, make_pipe)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run with the checkpoints of steps 10 and 20."""
    run_dir = tmp_path_factory.mktemp("saved")
    save(run_dir, 10)
    save(run_dir, 20)
    return run_dir


@pytest.fixture
def run_dir(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run")


@pytest.fixture
def newest(run_dir):
    return run_dir / "checkpoints" / "step_00000020"


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", ["manifest.json", *FILES])
def test_damage_is_found_by_name_and_the_one_before_is_taken(run_dir, newest, name, damage):
    damage(newest / name)
    found = newest_good(run_dir)
    assert found.folder.name == "step_00000010"
    assert found.manifest == verify(found.folder)
    assert [(error.folder, error.file) for error in found.damaged] == [(newest, name)]
    with pytest.raises(DamagedCheckpoint, match=rf"step_00000020: {name} "):
        verify(newest)


def test_what_was_found_and_expected_is_said(newest):
    os.truncate(newest / SHARDS[0], 1024)
    with pytest.raises(DamagedCheckpoint) as caught:
        verify(newest)
    says = f"{newest}: {SHARDS[0]} has 1,024 bytes, the manifest says 4,096"
    assert str(caught.value) == says
    assert str(pickle.loads(pickle.dumps(caught.value))) == says


def test_a_flipped_bit_anywhere_in_the_manifest_is_found(newest):
    file = newest / "manifest.json"
    whole = file.read_bytes()
    for at in range(0, len(whole), 3):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        with pytest.raises(DamagedCheckpoint, match=r"manifest\.json"):
            verify(newest, checksums=False)
    file.write_bytes(whole)
    verify(newest)


def test_an_unlisted_file_is_damage_only_in_the_state(newest):
    (newest / "notes.txt").write_text("mine")
    (newest / "state" / "empty").mkdir()
    verify(newest)
    (newest / "state" / "shard-00009.safetensors").write_bytes(b"of an earlier try")
    with pytest.raises(DamagedCheckpoint, match=r"state/shard-00009\.safetensors is not in the"):
        verify(newest, checksums=False)


@pytest.mark.parametrize("target", ["/etc", "../../outside"])
def test_a_state_that_is_elsewhere_is_damage(newest, target):
    shutil.move(newest / "state", newest.parents[1] / "outside")
    (newest / "state").symlink_to(target)
    with pytest.raises(DamagedCheckpoint, match=rf"{SHARDS[0]} is, or lies behind, a symbolic"):
        verify(newest, checksums=False)


def test_a_state_without_files_is_no_link_either(newest):
    whole = verify(newest)
    rest = {"driver.json": whole.files["driver.json"]}
    manifests.write(newest, dataclasses.replace(whole, files=rest))
    shutil.rmtree(newest / "state")
    verify(newest)
    (newest / "state").symlink_to(newest.parents[1] / "nowhere")
    with pytest.raises(DamagedCheckpoint, match="state is a symbolic link, expected a folder"):
        verify(newest)


def test_a_pipe_in_the_place_of_an_empty_file_is_not_waited_for(newest):
    (newest / "notes.txt").touch()
    whole = verify(newest)
    files = whole.files | {"notes.txt": digest(newest / "notes.txt")}
    manifests.write(newest, dataclasses.replace(whole, files=files))
    verify(newest)
    make_pipe(newest / "notes.txt")
    with pytest.raises(DamagedCheckpoint, match=r"notes\.txt is not a regular file"):
        verify(newest)


def test_a_folder_of_links_in_the_state_is_damage(newest):
    (newest / "state" / "more").symlink_to("/etc")
    with pytest.raises(DamagedCheckpoint, match="state/more is not in the manifest"):
        verify(newest, checksums=False)


def test_a_checkpoint_under_the_name_of_another_step_is_damage(newest):
    moved = newest.rename(newest.with_name("step_00000030"))
    with pytest.raises(DamagedCheckpoint, match="is of step 20, the folder's name says 30"):
        verify(moved)
    verify(moved.rename(moved.with_name("my_favourite")))


def test_sizes_alone_pass_what_checksums_find(newest):
    flip_one_bit(newest / SHARDS[1])
    assert verify(newest, checksums=False).files[SHARDS[1]].size == SIZE
    with pytest.raises(DamagedCheckpoint, match=rf"{SHARDS[1]} has the sha256 [0-9a-f]{{64}}, "):
        verify(newest)


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_anew(run_dir, newest):
    (newest / SHARDS[0]).unlink()
    truncate(newest.with_name("step_00000010") / "driver.json")
    with pytest.raises(NoWholeCheckpoint) as caught:
        newest_good(run_dir)
    text = str(caught.value)
    assert "2 problems with the run's checkpoints; none is whole. A new run needs another" in text
    assert f"step_00000020: {SHARDS[0]} is missing, the manifest says 4,096 bytes" in text
    assert "step_00000010: driver.json has 1,024 bytes, the manifest says 4,096" in text
