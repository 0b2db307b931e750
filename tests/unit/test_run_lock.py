"""One run at a time in a directory: the second is refused, and a killed one gives way."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hybridrl.app.lock import exclusive_run
from hybridrl.config.errors import ConfigError

HOLD = """
import sys, time
from pathlib import Path
from hybridrl.app.lock import exclusive_run
with exclusive_run(Path(sys.argv[1])):
    print("in", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def other(tmp_path):
    """Another process that has the directory."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    root = str(Path(__file__).resolve().parents[2])
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": root}
    )
    assert process.stdout.readline() == b"in\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_run_is_refused_and_told_by_whom(tmp_path, other, monkeypatch):
    monkeypatch.setattr("hybridrl.app.lock.LOCK_S", 0.3)
    with (
        pytest.raises(ConfigError, match=rf"in use by process {other.pid} on "),
        exclusive_run(tmp_path),
    ):
        pass


def test_a_run_that_was_killed_leaves_the_directory_free(tmp_path, other):
    other.send_signal(signal.SIGKILL)
    with exclusive_run(tmp_path):
        pass


def test_one_after_the_other_is_no_matter(tmp_path):
    for _ in range(2):
        with exclusive_run(tmp_path / "new"):
            assert (tmp_path / "new" / ".lock").read_text().startswith(f"process {os.getpid()} on ")


@pytest.mark.parametrize("folder", ["/proc", "/proc/run"])
def test_a_directory_that_cannot_be_written_to_is_named(folder):
    says = f"hydra.run.dir = {folder} cannot be written to: No such"
    with pytest.raises(ConfigError, match=says), exclusive_run(Path(folder)):
        pass
