"""Janitor: a process that cleans up after a run whose own process was killed.

    the run's process -> pipe -> janitor
    DONE                         the run has cleaned up: nothing to do
    end of file without DONE     the run was killed: end its processes, remove its files

It needs a few megabytes and imports nothing before it is needed. Ray's processes end with the
process that started them. Files, shared memory and stopped workers remain for the janitor.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

DONE = b"done"
# Seconds for processes to exit by themselves, and for the janitor to exit.
GRACE_S, END_S = 2.0, 5.0
# File in the run's folder that lists shared memory, one path per line.
SHARED_MEMORY_LIST = "shared_memory"
_COMMAND = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from hybridrl.controller.watch.janitor import main; main(*sys.argv[2:])"
)


class Janitor:
    """The run's handle of the janitor process.

    All processes of the run have an environment variable whose value is the folder to remove.
    """

    def __init__(self, variable: str, folder: Path) -> None:
        arguments = [json.dumps(sys.path), variable, str(folder), str(os.getpid())]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # out of reach of signals to the run's group
        )

    def dismiss(self) -> None:
        """End the janitor without a cleanup."""
        with suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self._process.communicate(DONE, timeout=END_S)
        self._process.kill()
        self._process.wait()


def main(variable: str, folder: str, run: str) -> None:
    """Wait for the end of the run's process, and clean up unless it has done so."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    if sys.stdin.buffer.read() == DONE:
        return
    from hybridrl.processes import cleanup

    members = cleanup.marked_processes(variable, Path(folder))
    left = cleanup.footprint([process.pid for process in members])
    listed = Path(folder, SHARED_MEMORY_LIST)
    paths = listed.read_text().splitlines() if listed.is_file() else []
    killed = cleanup.end(left, paths, GRACE_S)
    cleanup.wait_or_kill(cleanup.marked_processes(variable, Path(folder)), 0.0)
    shutil.rmtree(folder, ignore_errors=True)
    sys.stderr.write(
        f"The run's process (pid {run}) was killed. Cleaned up: {folder}, and {killed} "
        "process(es) that had not ended by themselves\n"
    )
