"""What a run leaves when its process is killed is cleared up; otherwise nothing is touched."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

OWNER = """
import os, signal, subprocess, sys, time
from pathlib import Path
from hybridrl.controller.janitor import Janitor

folder = Path(sys.argv[1])
janitor = Janitor("HYBRIDRL_TEST_MARK", folder)
member = os.environ | {"HYBRIDRL_TEST_MARK": str(folder)}
quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
sleeper = subprocess.Popen(["sleep", "60"], env=member, start_new_session=True, **quiet)
sleeper.send_signal(signal.SIGSTOP)
print(sleeper.pid, flush=True)
os.killpg(0, signal.SIGTERM) if sys.argv[2] == "group" else None
if sys.argv[2] == "dismiss":
    janitor.dismiss()
else:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def left():
    """A folder of a run that names a file in shared memory."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="hybridrl_test_", delete=False) as file:
        path = Path(file.name)
    folder = Path(tempfile.mkdtemp())
    (folder / "shared_memory").write_text(f"{path}\n")
    yield folder, path
    path.unlink(missing_ok=True)


def ended(folder: Path, how: str) -> tuple[subprocess.CompletedProcess[str], psutil.Process | None]:
    """Run the owner; what it printed, and its stopped process if that lives."""
    command = [sys.executable, "-c", OWNER, str(folder), how]
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    pid = int(done.stdout)
    living = psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return done, psutil.Process(pid) if living else None


@pytest.mark.parametrize("how", ["kill", "group"])
def test_a_killed_process_has_its_processes_folder_and_shared_memory_removed(left, how):
    folder, memory = left
    done, member = ended(folder, how)
    assert done.returncode == (-signal.SIGKILL if how == "kill" else -signal.SIGTERM)
    assert member is None and not folder.exists() and not memory.exists()
    assert "was killed. Cleared up after it" in done.stderr and str(folder) in done.stderr
    assert "1 process(es)" in done.stderr


def test_dismissed_it_touches_nothing(left):
    folder, memory = left
    done, member = ended(folder, "dismiss")
    assert done.returncode == 0 and done.stderr == ""
    assert member is not None and folder.exists() and memory.exists()
    os.kill(member.pid, signal.SIGKILL)
