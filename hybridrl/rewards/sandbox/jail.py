"""The inside of the sandbox: runs a program with each of its tests in a process of its own.

    hybridrl.rewards.sandbox.programs -> (bubblewrap) -> this process -> one process per test

Reads a line of JSON with the program and its limits from stdin, then a line per test, and answers
each with a line. Only this module and `kernel` are in the sandbox. No code under test runs in this
process: a test's process shows that it came to its end by a secret that was made for it.
"""

import json
import math
import os
import resource
import select
import signal
import sys
from types import ModuleType
from typing import Any

from hybridrl.config import kernel

_SECRET_BYTES = 16
# What a test's process reports, behind its stderr: that it begins, then the secret; or an error.
_REPORT, _BEGUN, _MAX_REPORT_BYTES = 3, b"begun", 4096
_MAX_OPEN_FILES = 64
_MAX_FILES = 10_000  # in /tmp; their names take memory, too
_MAX_THREADS = 64  # of all processes in the sandbox, this one included
_NOBODY = 65534


def main(stdin: str, stdout: str, parent: str, folder: str = "") -> None:
    """Serve requests until stdin ends.

    Args:
        stdin: descriptor of the file that each test reads; the caller fills it.
        stdout: of the one into which it writes.
        parent: the caller's process id as it is seen here.
        folder: in bubblewrap, where the program's own files go.
    """
    os.environ.clear()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which process 1 ignores
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    setup = json.loads(requests.readline())
    if folder:
        kernel.mount_memory(folder, setup["file_mb"], _MAX_FILES)
        os.chdir(folder)
        kernel.become_powerless(_NOBODY)
    kernel.end_with(int(parent))  # behind the change of user, which would undo it
    print("ready", file=answers, flush=True)
    for request in requests:
        test = json.loads(request)
        print(_outcome(setup, test, (int(stdin), int(stdout))), file=answers, flush=True)


def _outcome(setup: dict[str, Any], test: dict[str, Any], files: tuple[int, int]) -> str:
    """How the program did in one test, its output aside: passed, failed, timeout or an error."""
    secret = os.urandom(_SECRET_BYTES)
    told, tell = os.pipe()
    judge = os.getpid()
    child = os.fork()
    if child == 0:
        _become_program(setup, test["statements"], (*files, tell), judge, secret)
    os.close(tell)
    begun = os.read(told, len(_BEGUN))
    watched = os.pidfd_open(child)
    in_time = bool(select.select([watched], [], [], test["seconds"])[0])
    os.close(watched)
    os.killpg(child, signal.SIGKILL)  # with what it may have started where nothing forbids it
    status = os.waitpid(child, 0)[1]
    report = os.read(told, _MAX_REPORT_BYTES) if select.select([told], [], [], 0)[0] else b""
    os.close(told)
    if begun != _BEGUN:
        return f"error {(begun + report).decode() or 'a process ended before it began'}"
    if not in_time or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU):
        return "timeout"
    return "passed" if report == secret else "failed"


def _become_program(
    setup: dict[str, Any],
    statements: str | None,
    fds: tuple[int, int, int],
    judge: int,
    secret: bytes,
) -> None:
    """Take on the limits, run the program and its test, and report how far that came."""
    try:
        stdin, stdout, tell = fds
        try:
            os.setsid()
            kernel.end_with(judge)
            stderr = os.open(os.devnull, os.O_WRONLY)
            _limit(setup)
        except OSError as error:
            os.write(tell, str(error).encode())
            return
        # No source lies below its target: 0, 1 and 2 were open before the caller's files.
        for number, fd in enumerate((stdin, stdout, stderr, tell)):
            os.dup2(fd, number)
        os.closerange(_REPORT + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        os.write(_REPORT, _BEGUN)
        _run(setup["program"], statements)
        os.write(_REPORT, secret)
    finally:
        os._exit(0)


def _limit(setup: dict[str, Any]) -> None:
    """Set the limits of this process, for good."""
    limits = {
        resource.RLIMIT_AS: setup["memory_mb"] << 20,
        resource.RLIMIT_FSIZE: setup["file_mb"] << 20,
        resource.RLIMIT_NOFILE: _MAX_OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    if setup["filter"]:  # in namespaces of its own; elsewhere all of the user's would count
        limits[resource.RLIMIT_NPROC] = _MAX_THREADS
    for kind, most in limits.items():
        resource.setrlimit(kind, (most, most))
    cpu = math.ceil(setup["seconds_per_test"])
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
    if setup["filter"]:
        kernel.refuse_calls(bytes.fromhex(setup["filter"]))


def _run(program: str, statements: str | None) -> None:
    """Execute the program as a script, or as a module whose names the test's statements see."""
    name = "__main__" if statements is None else "program"
    module = sys.modules[name] = ModuleType(name)
    # Before the program runs: it may replace what it likes in this process.
    execute, stdout = exec, sys.stdout
    code = compile(program, "program.py", "exec")
    test = compile(statements or "", "test.py", "exec")
    try:
        execute(code, vars(module))
    except SystemExit as end:
        if statements is not None or end.code not in (None, 0):
            raise
    execute(test, vars(module))
    stdout.flush()
