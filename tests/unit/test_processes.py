"""The end of worker processes: which ones are waited for, which are killed."""

import logging
import subprocess
import sys
import time

import psutil
import pytest

from hybridrl.processes.cleanup import wait_or_kill

# Starts a process that ends at once, prints its id and never reads its exit status.
PARENT = (
    "import subprocess, time\n"
    "child = subprocess.Popen(['true'])\n"  # a Popen that is deleted reaps
    "print(child.pid, flush=True)\n"
    "time.sleep(60)\n"
)


@pytest.fixture
def zombie():
    """Return a process that has ended and that its parent does not reap."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    process = psutil.Process(int(parent.stdout.readline()))
    while process.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    yield process
    parent.kill()
    parent.wait()
    parent.stdout.close()


def test_a_zombie_is_not_waited_for(zombie, caplog):
    start = time.monotonic()
    with caplog.at_level(logging.ERROR):
        assert wait_or_kill([zombie], grace_s=20) == 0
    assert time.monotonic() - start < 10
    assert caplog.text == ""


def test_a_process_that_does_not_end_is_killed():
    child = subprocess.Popen(["sleep", "60"])
    assert wait_or_kill([psutil.Process(child.pid)], grace_s=0.1) == 1
    assert not psutil.pid_exists(child.pid)
