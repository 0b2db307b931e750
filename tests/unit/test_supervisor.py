"""The supervisor of a process that runs user code: all below it ends, soon."""

import os
import signal
import subprocess
import sys

from hybridrl.config.user_code.supervisor import SIGNAL_CODES
from tests.unit.scorers import is_gone

# Its worker starts processes that leave its group, and writes their ids.
MANY = """
import os, sys, time
from hybridrl.config.user_code.supervisor import supervise
supervise(os.getppid(), os.open(os.devnull, os.O_RDONLY))
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
