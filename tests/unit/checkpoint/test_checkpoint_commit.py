"""Beginning, committing, abandoning: what is on the disk when, and what is refused."""

import os
from pathlib import Path

import pytest

from hybridrl.checkpoint import commit
from hybridrl.checkpoint.files import sync_file, sync_folder
from hybridrl.checkpoint.manifest import DamagedCheckpoint
from hybridrl.checkpoint.verification import verify
from tests.support.checkpoint_cases import FILES, SHARDS, content, manifest_of, save

pytestmark = pytest.mark.full


def written(run_dir: Path, step: int) -> Path:
    """A checkpoint that is ready to be committed."""
    partial = commit.begin(run_dir, step)
    for name in FILES:
        (partial / name).write_bytes(content(step, name))
    return partial


def test_a_checkpoint_appears_under_its_name(tmp_path):
    partial = written(tmp_path, 20)
    folder = tmp_path / "checkpoints"
    assert [path.name for path in folder.iterdir()] == [".step_00000020.partial"]
    manifest = manifest_of(partial, 20, loss=0.5)
    final = commit.commit(partial, manifest)
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000020"]
    assert final == folder / "step_00000020"
    assert verify(final) == manifest
    assert (final / SHARDS[1]).read_bytes() == content(20, SHARDS[1])


def test_all_is_on_the_disk_before_its_name_is(tmp_path, monkeypatch):
    """Files, the folders that name them, the rename, and then its folder."""
    partial = written(tmp_path, 20)
    calls = []

    def noted(function, name):
        def call(*arguments):
            targets = [
                os.readlink(f"/proc/self/fd/{one}") if isinstance(one, int) else str(one)
                for one in arguments
            ]
            calls.append((name, Path(targets[-1]).name))
            return function(*arguments)

        return call

    for name in ("fsync", "rename", "replace"):
        monkeypatch.setattr(os, name, noted(getattr(os, name), name))
    commit.commit(partial, manifest_of(partial, 20))
    named = calls.index(("rename", "step_00000020"))
    files = {("fsync", Path(name).name) for name in ("manifest.json", *FILES)}
    assert files <= set(calls[:named])
    folders = [("fsync", "state"), ("fsync", partial.name)]
    last_file = max(calls.index(file) for file in files)
    assert all(last_file < calls.index(folder) < named for folder in folders)
    assert calls[named + 1 :] == [("fsync", "checkpoints")]


def test_the_folder_of_checkpoints_itself_is_on_the_disk(tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync

    def noted(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    commit.begin(tmp_path, 20)
    assert synced == [str(tmp_path)]


def test_only_a_file_system_that_syncs_no_folders_is_excused():
    with pytest.raises(OSError, match="Invalid argument"):
        sync_file(Path("/proc"))
    sync_folder(Path("/proc"))
    with pytest.raises(FileNotFoundError):
        sync_folder(Path("/proc/nowhere"))


def test_a_save_of_the_same_step_is_refused_and_the_first_stays(tmp_path):
    final = save(tmp_path, 20, loss=1.0)
    with pytest.raises(OSError, match="not empty"):
        save(tmp_path, 20, loss=2.0)
    assert verify(final).metrics == {"loss": 1.0}


def test_begin_removes_what_crashes_left_and_nothing_else(tmp_path):
    save(tmp_path, 10)
    folder = tmp_path / "checkpoints"
    left = (".step_00000020.partial", ".step_00000005.removed")
    kept = ("damaged_step_00000030", ".git", ".step_1.partial", "step_00000040.partial", "mine")
    for name in (*left, *kept):
        (folder / name / "state").mkdir(parents=True)
    partial = commit.begin(tmp_path, 20)
    assert [path.name for path in partial.iterdir()] == ["state"]
    names = {path.name for path in folder.iterdir()}
    assert names == {partial.name, "step_00000010", *kept}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda partial: (partial / SHARDS[0]).unlink(), "is missing"),
        (lambda partial: os.truncate(partial / "driver.json", 7), "has 7 bytes"),
        (lambda partial: (partial / "state" / "x").touch(), "is not in the manifest"),
        (lambda partial: (partial / "manifest.json").mkdir(), "Is a directory"),
    ],
)
def test_what_differs_from_its_manifest_is_not_committed(tmp_path, change, says):
    save(tmp_path, 10)
    partial = written(tmp_path, 20)
    manifest = manifest_of(partial, 20)
    change(partial)
    with pytest.raises((DamagedCheckpoint, OSError), match=says):
        commit.commit(partial, manifest)
    commit.abandon(partial)
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000010"]


def test_a_manifest_of_another_step_is_not_committed(tmp_path):
    partial = written(tmp_path, 20)
    with pytest.raises(DamagedCheckpoint, match="is of step 30, the folder's name says 20"):
        commit.commit(partial, manifest_of(partial, 30))


def test_abandon_leaves_no_trace_and_may_be_called_twice(tmp_path):
    partial = written(tmp_path, 20)
    commit.abandon(partial)
    commit.abandon(partial)
    assert list((tmp_path / "checkpoints").iterdir()) == []
