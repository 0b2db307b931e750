"""Supervisor of a process that runs user code: ends it with all its descendants.

    this process -> supervisor -> worker -> processes of the user's code

The kernel makes the supervisor the parent of all orphans below it (subreaper). So it also finds
processes that left their group, session or parent.
"""

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from hybridrl.config.user_code.kernel import adopt_orphans, end_with

_AWAITED = {signal.SIGTERM, signal.SIGCHLD}
# Seconds from SIGTERM to SIGKILL of a supervisor.
END_TIMEOUT_S = 5.0
# Exit codes from here on: the worker was killed by signal code - SIGNAL_CODES.
SIGNAL_CODES = 128
# Folders that their owner may not list or change are opened.
_REMOVE = (
    'rm -rf "$1" 2>/dev/null || '
    '{ find "$1" -type d ! -perm -700 -exec chmod 700 {} \\; 2>/dev/null; rm -rf "$1"; }'
)


def supervise(parent: int, fd: int, folder: str = "") -> None:
    """Fork; the child returns as the worker, this process becomes its supervisor.

    The supervisor exits after the worker, at SIGTERM, or when its parent dies, and first kills all
    its descendants. Its exit code is the worker's, or SIGNAL_CODES + the signal.

    Args:
        parent: id of the parent process.
        fd: closed in the supervisor, so that the other end sees the worker's exit.
        folder: removed by the supervisor before it exits.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent to handle
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    adopt_orphans()
    end_with(parent, signal.SIGTERM)
    supervisor = os.getpid()
    worker = os.fork()
    if worker:
        os.close(fd)
        code = _watch(worker)
        remove(folder)
        os._exit(code)
    os.setpgid(0, 0)  # a signal to its own group spares the supervisor
    end_with(supervisor)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)


def end(process: subprocess.Popen[Any]) -> int:
    """End a supervisor and all below it; return its exit code."""
    process.terminate()
    try:
        return process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def remove(folder: str) -> str:
    """Remove a folder and all below it, however deep; return why some is left, or an empty text."""
    if not os.path.lexists(folder):
        return ""
    try:
        command = ["sh", "-c", _REMOVE, "sh", folder]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    except OSError as error:
        return str(error)
    return done.stderr.decode(errors="replace").partition("\n")[0]


def describe_exit(code: int) -> str:
    """Return how a worker ended, from the exit code of its supervisor."""
    killed_by = -code if code < 0 else code - SIGNAL_CODES
    return f"killed by signal {killed_by}" if killed_by > 0 else f"exit code {code}"


def _watch(worker: int) -> int:
    """Wait for the worker's end or SIGTERM, kill all that is left, return the exit code."""
    status: int | None = None
    while status is None and signal.sigwait(_AWAITED) == signal.SIGCHLD:
        status = _reap(-1, os.WNOHANG).get(worker)
    # A process may start others until it is dead, hence again.
    while left := _descendants():
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        # Parents before their children, whose parent is then this process.
        for pid in left:
            status = _reap(pid, 0).get(worker, status)
    assert status is not None
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else SIGNAL_CODES - code


def _reap(child: int, options: int) -> dict[int, int]:
    """Wait for children as waitpid does; return the statuses of those that ended, by id."""
    ended: dict[int, int] = {}
    with suppress(ChildProcessError):
        while (found := os.waitpid(child, options))[0]:
            ended |= [found]
    return ended


def _descendants() -> list[int]:
    """Return all descendants of this process, each after its parent."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # ended meanwhile
            # The name, in parentheses, may contain anything; state and parent follow it.
            parent = stat.read_bytes().rpartition(b")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(stat.parent.name))
    found = list(children.get(os.getpid(), ()))
    for pid in found:  # grows meanwhile
        found += children.get(pid, ())
    return found
