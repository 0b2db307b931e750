"""What a run leaves when its process is killed is cleared up; otherwise nothing is touched."""

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

OWNER = '''
import os, signal, subprocess, sys, time
from pathlib import Path
from hybridrl.controller.watch.janitor import Janitor

# As an agent of Ray: its title has taken the place of its environment.
TITLED = """
import os, sys, time
open("/proc/self/comm", "w").write("ray::Agent")
log = open(sys.argv[1], "w")
os.close(1), os.close(2)
time.sleep(60)
"""
folder = Path(sys.argv[1])
janitor = Janitor("HYBRIDRL_TEST_MARK", folder)
member = os.environ | {"HYBRIDRL_TEST_MARK": str(folder)}
quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
sleeper = subprocess.Popen(["sleep", "60"], env=member, start_new_session=True, **quiet)
sleeper.send_signal(signal.SIGSTOP)
titled = subprocess.Popen([sys.executable, "-c", TITLED, folder / "log"], start_new_session=True)
while not (folder / "log").exists():
    time.sleep(0.01)
print(sleeper.pid, titled.pid, flush=True)
os.killpg(0, signal.SIGTERM) if sys.argv[2] == "group" else None
if sys.argv[2] == "dismiss":
    janitor.dismiss()
else:
    os.kill(os.getpid(), signal.SIGKILL)
'''


@pytest.fixture
def left():
    """A folder of a run that names a file in shared memory."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="hybridrl_test_", delete=False) as file:
        path = Path(file.name)
    folder = Path(tempfile.mkdtemp())
    (folder / "shared_memory").write_text(f"{path}\n")
    yield folder, path
    path.unlink(missing_ok=True)


def ended(folder: Path, how: str) -> tuple[subprocess.CompletedProcess[str], list[int]]:
    """Run the owner; what it printed, and those of its processes that live, one of them stopped."""
    command = [sys.executable, "-c", OWNER, str(folder), how]
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    living = []
    for pid in map(int, done.stdout.split()):
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                living.append(pid)
    return done, living


@pytest.mark.parametrize("how", ["kill", "group"])
def test_a_killed_process_has_its_processes_folder_and_shared_memory_removed(left, how):
    folder, memory = left
    done, living = ended(folder, how)
    assert done.returncode == (-signal.SIGKILL if how == "kill" else -signal.SIGTERM)
    assert not living and not folder.exists() and not memory.exists()
    assert f"was killed. Cleaned up: {folder}" in done.stderr
    assert "2 process(es)" in done.stderr


def test_dismissed_it_touches_nothing(left):
    folder, memory = left
    done, living = ended(folder, "dismiss")
    assert done.returncode == 0 and done.stderr == ""
    assert len(living) == 2 and folder.exists() and memory.exists()
    for pid in living:
        os.kill(pid, signal.SIGKILL)
