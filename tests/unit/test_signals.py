"""A terminal that closes ends a program as SIGTERM does, unless it runs under nohup."""

import signal
import subprocess
import sys
import time

import pytest

from tests.support.terminals import terminal

PROGRAM = """
import sys, time
from pathlib import Path
from hybridrl.app.process import exit_codes, set_up_process
from hybridrl.controller.output import guard_standard_output
from hybridrl.controller.signals import Preempted, Preemption, signal_guard

set_up_process()
guard_standard_output()
with exit_codes(), signal_guard(), Preemption(float(sys.argv[1])) as preemption:
    Path("ready").touch()
    for _ in range(100):
        time.sleep(0.01)
        if preemption.is_asked:
            break
    time.sleep(0.2)  # in which other signals may come
    print("nobody reads this")
    Path("checkpoint").touch()
    if preemption.is_asked:
        raise Preempted(preemption.asked_by[0], Path("checkpoint"))
"""


@pytest.mark.parametrize(
    ("before", "grace_s", "more", "code"),
    [
        ([], 60.0, [], 75),
        # The shell sends it, too; a system that goes down sends SIGTERM.
        ([], 60.0, [signal.SIGHUP, signal.SIGTERM], 75),
        ([], 60.0, [signal.SIGTERM, signal.SIGTERM], 129),
        ([], 0.0, [signal.SIGHUP], 129),
        (["nohup"], 60.0, [signal.SIGHUP], 0),
    ],
)
def test_a_terminal_that_closes(tmp_path, before, grace_s, more, code):
    command = [*before, sys.executable, "-c", PROGRAM, str(grace_s)]
    with terminal() as window, subprocess.Popen(command, cwd=tmp_path, **window.options) as process:
        while not (tmp_path / "ready").exists():
            assert process.poll() is None
            time.sleep(0.01)
        window.hang_up()
        for signum in more:
            time.sleep(0.05)
            process.send_signal(signum)
        assert process.wait(20) == code
    assert (tmp_path / "checkpoint").exists() == (code != 129)
