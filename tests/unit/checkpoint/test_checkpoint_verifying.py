"""A verification of minutes: it tells how far it is, and ends when nobody waits for it."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hybridrl.checkpoint import manifest as manifests
from hybridrl.checkpoint.manifest import DamagedCheckpoint, FileRecord
from hybridrl.checkpoint.verification import verify
from hybridrl.trainer.checkpointing.verification import VerificationEnded, VerificationProgress
from tests.support.checkpoint_cases import (
    FILES,
    SIZE,
    huge_checkpoint,
    manifest,
    save,
    wait_until,
)

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def huge(tmp_path) -> Path:
    return huge_checkpoint(tmp_path)


def has_read(pid: int, size: int) -> bool:
    """Whether a process has read so many bytes."""
    with contextlib.suppress(FileNotFoundError):
        return int(Path(f"/proc/{pid}/io").read_text().split()[1]) > size
    return False


def test_signals_end_a_command_that_verifies_at_once(huge, tmp_path):
    call = [sys.executable, "-m", "hybridrl.cli", "export", str(huge), str(tmp_path / "out")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for signum, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        with subprocess.Popen(
            call, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
        ) as command:
            wait_until(lambda: has_read(command.pid, 2**26) or command.poll() is not None)
            command.send_signal(signum)
            start = time.monotonic()
            _, said = command.communicate(timeout=60)
            assert time.monotonic() - start < 2, "the readers were waited for"
        assert (command.returncode, said) == (code, f"Stopped by {signum.name}\n")


def test_leaving_the_block_ends_a_verification_of_another_thread(huge):
    reading = threading.Event()

    def tell(line: str) -> None:
        reading.set()

    clock = iter(range(0, 10**9, 5)).__next__
    with ThreadPoolExecutor(1) as pool:
        with VerificationProgress(tell, clock) as watch:
            verifying = pool.submit(verify, huge, watch=watch)
            assert reading.wait(30)
        start = time.monotonic()
        with pytest.raises(VerificationEnded):
            verifying.result(timeout=30)
    assert time.monotonic() - start < 2


def test_damage_does_not_wait_for_the_files_behind_it(huge):
    """Whoever falls back to the checkpoint before does not wait for the rest of this one."""
    (huge / "driver.json").write_bytes(b"x")
    files = manifests.read(huge).files | {"driver.json": FileRecord(1, "0" * 64)}
    manifests.write(huge, manifest(20, files))
    start = time.monotonic()
    with pytest.raises(DamagedCheckpoint, match=r"driver\.json has the sha256"):
        verify(huge)
    assert time.monotonic() - start < 5


def test_the_watch_sees_all_bytes_go_by_once(tmp_path):
    folder, seen = save(tmp_path, 20), []
    verify(folder, watch=lambda *arguments: seen.append(arguments))
    size = 2 * SIZE + (folder / "driver.json").stat().st_size
    assert {(at, total) for at, _, total in seen} == {(folder, size)}
    read = [count for _, count, _ in seen]
    assert read == sorted(read) and len(read) >= len(FILES) and read[-1] <= size


def test_lines_come_after_three_seconds_and_then_every_ten():
    lines: list[tuple[int, str]] = []
    clock = iter(range(100)).__next__
    watch = VerificationProgress(lambda line: lines.append((second, line)), clock)
    for second in range(30):
        watch(Path("run/step_00000020"), second * 2**30, 40 * 2**30)
    told = "Verifying run/step_00000020:"
    assert lines == [
        (3, f"{told} 8% of 40.0 GiB, ETA 0:00:37"),
        (13, f"{told} 32% of 40.0 GiB, ETA 0:00:27"),
        (23, f"{told} 57% of 40.0 GiB, ETA 0:00:17"),
    ]


def test_the_time_of_another_checkpoint_is_its_own():
    lines: list[str] = []
    watch = VerificationProgress(lines.append, iter([0, 9, 12]).__next__)
    watch(Path("run/step_00000020"), 2**30, 2**31)
    watch(Path("run/step_00000010"), 0, 2**30)
    assert lines == []
    watch(Path("run/step_00000010"), 0, 2**30)
    assert lines == ["Verifying run/step_00000010: 0% of 1.0 GiB, ETA ?"]


def test_nothing_is_told_of_a_small_checkpoint(tmp_path):
    lines: list[str] = []
    verify(save(tmp_path, 20), watch=VerificationProgress(lines.append))
    assert lines == []
