"""The supervisor of a process that runs user code: all below it ends, soon."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hybridrl.processes.supervisor import SIGNAL_CODES
from tests.support.scorers import is_gone, wait_for

# Its worker starts processes that leave its group, and writes their ids.
MANY = """
import os, sys, time
from hybridrl.processes.supervisor import supervise
supervise(os.getppid())
for _ in range(int(sys.argv[1])):
    if os.fork() == 0:
        os.setsid()
        break
os.write(1, b"%d\\n" % os.getpid())
time.sleep(600)
"""


def test_many_processes_end_in_linear_time():
    """By one look at /proc for all of them: one for each would take some 8 s of CPU."""
    command = [sys.executable, "-c", MANY, "600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        started = [int(process.stdout.readline()) for _ in range(601)]
        process.terminate()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == SIGNAL_CODES + signal.SIGKILL
    assert all(map(is_gone, started))
    assert used.ru_utime + used.ru_stime < 3.0, used


# Its worker fills a folder that its supervisor removes.
FOLDER = """
import os, sys, time
from hybridrl.processes.supervisor import supervise
parent, folder, end = os.getppid(), *sys.argv[1:]
if end == "parent dies":
    parent = os.getpid()
    if os.fork():
        os.read(0, 1)
        os._exit(0)
supervise(parent, folder=folder)
os.chdir(folder)
open("file", "w").close()
os.mkdir("closed")
open("closed/file", "w").close()
os.chmod("closed", 0o500)
os.symlink("/", "root")
for _ in range(3000):
    os.mkdir("deep")
    os.chdir("deep")
print("filled", flush=True)
if end != "worker ends":
    time.sleep(600)
"""


@pytest.mark.parametrize("end", ["worker ends", "SIGTERM", "parent dies"])
def test_its_folder_goes_with_a_process(tmp_path, end):
    """Also one with closed folders in it, and nested ones whose path is too long for Linux."""
    folder = tmp_path / "folder"
    folder.mkdir()
    command = [sys.executable, "-c", FOLDER, str(folder), end]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"filled\n"
        if end == "SIGTERM":
            process.terminate()
        process.communicate(b"x")
    assert wait_for(lambda: not folder.exists())
    assert Path("/").exists()
