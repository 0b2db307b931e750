"""A disk that fails to read is no damage: nothing is passed over, renamed or removed for it."""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridrl.checkpoint import files, verification
from hybridrl.checkpoint.files import UnreadableFile, retried
from hybridrl.checkpoint.manifest import FileRecord
from hybridrl.checkpoint.verification import digest
from tests.support.checkpoint_cases import FILES, SIZE, save
from tests.support.host_cases import probe_mounted

pytestmark = pytest.mark.full

MODULE = "tests.support.failing_disk_cases"


def on_a_disk(tmp_path: Path, call: str):
    mounts = f"mount -t tmpfs -o size=500k tmpfs {tmp_path}; cd {tmp_path}"
    root = Path(__file__).resolve().parents[3]
    return probe_mounted(MODULE, call, mounts, PYTHONPATH=str(root))


def test_a_file_that_cannot_be_read_is_named_and_nothing_is_passed_over(tmp_path):
    told = on_a_disk(tmp_path, f"unreadable_files(Path('{tmp_path}'))")
    for file, texts in told.items():
        path = tmp_path / "checkpoints" / "step_00000020" / file
        for text in texts:
            assert f"{path} cannot be read: Input/output error (EIO)" in text
            assert "run the same command again" in text


def test_a_folder_that_may_not_be_read_is_named_and_nothing_is_passed_over(tmp_path):
    told = on_a_disk(tmp_path, "unreadable_folders()")
    state, checkpoints = told.values()
    assert "checkpoints/step_00000020/state/" in state
    assert "checkpoints cannot be read" in checkpoints
    assert all("Permission denied (EACCES)" in text for text in told.values())


def test_a_file_that_can_be_read_again_is_as_good_as_ever(tmp_path):
    found, aside = on_a_disk(tmp_path, f"mended_meanwhile(Path('{tmp_path}'))")
    assert found == "step_00000020" and aside == []


def test_bytes_of_an_attempt_that_failed_do_not_count(tmp_path, monkeypatch):
    folder, seen, errors = save(tmp_path, 20), [], [OSError(errno.EIO, "once")]

    def fails_at_the_end(path: Path, note: Callable[[int], None]) -> FileRecord:
        record = digest(path, note)
        if errors and path.name == min(FILES):
            raise errors.pop()
        return record

    monkeypatch.setattr(verification, "digest", fails_at_the_end)
    verification.verify(folder, watch=lambda folder, read, size: seen.append(read))
    assert not errors
    assert SIZE <= max(seen) <= len(FILES) * SIZE


def test_what_cannot_be_read_is_not_pruned_nor_pushes_out_another(tmp_path):
    left = on_a_disk(tmp_path, f"left_by_pruning(Path('{tmp_path}'))")
    assert left == ["step_00000010", "step_00000020"]


@pytest.mark.parametrize("absent", [errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG])
def test_what_is_not_there_is_not_waited_for(absent):
    def read(path: Path) -> None:
        raise OSError(absent, "no such thing", "elsewhere")

    with pytest.raises(FileNotFoundError, match="'here'"):
        retried(read, Path("here"), wait=pytest.fail)


def test_attempts_are_over_after_some_seconds_and_the_last_error_is_told():
    errors = iter([errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EACCES, errno.EIO])
    waited: list[float] = []

    def read(path: Path) -> None:
        number = next(errors)
        raise OSError(number, f"error {number}")

    with pytest.raises(UnreadableFile, match=f"error {errno.EACCES}: 'here'"):
        retried(read, Path("here"), waited.append)
    assert waited == list(files.PAUSES_S) and 2 < sum(waited) < 10
