"""Supervisor of a process that runs user code: ends it with all its descendants.

    this process -> supervisor -> worker -> processes of the user's code

The kernel makes the supervisor the parent of all orphans below it (subreaper). So it also reaches
processes that left their group, session or parent.
"""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hybridrl.processes.kernel import adopt_orphans, end_with

_AWAITED = {signal.SIGTERM, signal.SIGCHLD}
# Seconds from SIGTERM to SIGKILL of a supervisor.
END_TIMEOUT_S = 5.0
# Exit codes from here on: the worker was killed by signal code - SIGNAL_CODES.
SIGNAL_CODES = 128
_EXECUTE = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from hybridrl.processes.supervisor import execute; execute(*map(int, sys.argv[2:4]))"
)
_ROOT = str(Path(__file__).resolve().parents[2])
# Folders that their owner may not list or change are opened.
_REMOVE = (
    'rm -rf "$1" 2>/dev/null || '
    '{ find "$1" -type d ! -perm -700 -exec chmod 700 {} \\; 2>/dev/null; rm -rf "$1"; }'
)


def supervise(parent: int, *, fd: int | None = None, folder: str = "") -> None:
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
        if fd is not None:
            os.close(fd)
        code = _watch(worker)
        remove(folder)
        os._exit(code)
    os.setpgid(0, 0)  # a signal to its own group spares the supervisor
    end_with(supervisor)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)


def supervised(command: Sequence[str], memory_mb: int) -> list[str]:
    """Return a command that runs another one below a supervisor, with this process as parent."""
    start = [sys.executable, "-I", "-S", "-c", _EXECUTE, _ROOT]
    return [*start, str(os.getpid()), str(memory_mb), *command]


def execute(parent: int, memory_mb: int) -> None:
    """Become the command of `supervised`."""
    supervise(parent)
    limit_memory(memory_mb)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    command = sys.argv[4:]
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


def limit_memory(memory_mb: int) -> None:
    """Limit the data of this process and those that it starts; they may raise it.

    Not the address space, of which Node reserves 10 GiB for each WebAssembly module.
    """
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (memory_mb << 20, hard))


def end(supervisor: subprocess.Popen[Any]) -> int:
    """End a supervisor and all below it; return its exit code."""
    supervisor.terminate()
    try:
        return supervisor.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        supervisor.kill()
        return supervisor.wait()


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


def stat_of(pid: int) -> tuple[str, int]:
    """Return the letter of a process's state and its parent; ("", 0) if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return "", 0
    # The name, in parentheses, may contain anything.
    state, parent = stat.rpartition(b")")[2].split()[:2]
    return state.decode(), int(parent)


def _watch(worker: int) -> int:
    """Wait for the worker's end or SIGTERM, kill all that is left, return the exit code."""
    statuses: dict[int, int] = {}
    while worker not in statuses and signal.sigwait(_AWAITED) == signal.SIGCHLD:
        statuses |= _reap(-1, os.WNOHANG)
    # A process may start others until it is dead, hence again.
    while left := _descendants():
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        # Parents before their children, whose parent is then this process.
        for pid in left:
            statuses |= _reap(pid, 0)
    code = os.waitstatus_to_exitcode(statuses[worker])
    return code if code >= 0 else SIGNAL_CODES - code


def _reap(child: int, options: int) -> dict[int, int]:
    """Wait for children as waitpid does; return the statuses of those that ended, by id."""
    statuses: dict[int, int] = {}
    with suppress(ChildProcessError):
        while (ended := os.waitpid(child, options))[0]:
            statuses |= [ended]
    return statuses


def _descendants() -> list[int]:
    """Return all descendants of this process, each after its parent."""
    children: dict[int, list[int]] = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with suppress(OSError):  # hidden, as another user's may be
            children.setdefault(stat_of(pid)[1], []).append(pid)
    below = list(children.get(os.getpid(), ()))
    for pid in below:  # grows meanwhile
        below += children.get(pid, ())
    return below
