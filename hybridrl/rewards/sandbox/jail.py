"""Process inside the sandbox: runs a program with each of its tests in a separate process.

    hybridrl.rewards.sandbox.programs -> (bubblewrap) -> this process -> one process per test

It reads JSON with the program, its limits and its tests from stdin. It writes "ready", then for
each test a line of JSON: the outcome, and a digest of the output. The expected one is compared
outside. Only this module and `kernel` are visible in the sandbox. No code under test runs in this
process: the test's process proves that it reached the end by a random secret.
"""

import atexit
import hashlib
import json
import math
import os
import resource
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from io import FileIO
from types import ModuleType
from typing import Any

from hybridrl.processes import kernel

_SECRET_BYTES = 16
# A test's process reports on descriptor 3: its begin, then the secret; or an error.
_REPORT, _BEGUN, _MAX_REPORT_BYTES = 3, b"begun", 4096
_MAX_OPEN_FILES = 64
_MAX_FILES = 10_000  # in /tmp; names use memory as well
_MAX_THREADS = 64  # of all processes in the sandbox, including this one
_NOBODY = 65534


def main(parent: str, folder: str = "") -> None:
    """Run the tests.

    Args:
        parent: the caller's process id in this process's namespace.
        folder: in bubblewrap, mount point of the program's folder.
    """
    os.environ.clear()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 ignores it by default
    with os.fdopen(os.dup(0)) as file:
        setup = json.load(file)
    if folder:
        kernel.mount_memory(folder, setup["file_mb"], _MAX_FILES)
        os.chdir(folder)
        kernel.become_powerless(_NOBODY)
    kernel.end_with(int(parent))  # after the change of user, which would reset it
    print("ready", flush=True)
    end, has_failed = time.monotonic() + setup["seconds"], False
    for test in setup["tests"]:
        seconds = min(setup["seconds_per_test"], end - time.monotonic())
        if seconds <= 0 or (has_failed and setup["stop_at_failure"]):
            answer = ["timeout" if seconds <= 0 else "failed", ""]
        else:
            answer = _answer(setup, test, seconds)
        has_failed = has_failed or answer[0] != "passed"
        print(json.dumps(answer), flush=True)


def digest(output: str) -> str:
    """Return a digest that ignores white space at the end of lines and of the whole."""
    lines = [line.rstrip() for line in output.rstrip().split("\n")]
    return hashlib.sha256("\n".join(lines).encode(errors="surrogatepass")).hexdigest()


def _answer(setup: dict[str, Any], test: dict[str, Any], seconds: float) -> list[str]:
    """Run one test; return its outcome and the digest of its output."""
    with (
        FileIO(os.memfd_create("stdin"), "r+") as stdin,
        FileIO(os.memfd_create("stdout"), "r+") as stdout,
    ):
        stdin.write(test["stdin"].encode(errors="replace"))
        stdin.seek(0)
        outcome = _outcome(setup, test["statements"], seconds, (stdin.fileno(), stdout.fileno()))
        stdout.seek(0)
        return [outcome, digest(stdout.readall().decode(errors="replace"))]


def _outcome(
    setup: dict[str, Any], statements: str | None, seconds: float, files: tuple[int, int]
) -> str:
    """Run one test in a process; return passed, failed or timeout.

    Raises:
        OSError: the process could not be set up.
    """
    secret = os.urandom(_SECRET_BYTES)
    report_fd, child_end = os.pipe()
    jail = os.getpid()
    child = os.fork()
    if child == 0:
        _become_program(setup, statements, (*files, child_end), jail, secret)
    os.close(child_end)
    begun = os.read(report_fd, len(_BEGUN))
    watched = os.pidfd_open(child)
    in_time = bool(select.select([watched], [], [], seconds)[0])
    os.close(watched)
    os.killpg(child, signal.SIGKILL)  # with its children, which are allowed without a filter
    status = os.waitpid(child, 0)[1]
    has_report = select.select([report_fd], [], [], 0)[0]
    report = os.read(report_fd, _MAX_REPORT_BYTES) if has_report else b""
    os.close(report_fd)
    if begun != _BEGUN:
        raise OSError((begun + report).decode() or "a process ended before it began")
    if not in_time or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU):
        return "timeout"
    return "passed" if report == secret else "failed"


def _become_program(
    setup: dict[str, Any],
    statements: str | None,
    fds: tuple[int, int, int],
    jail: int,
    secret: bytes,
) -> None:
    """Set the limits, run the program and its test, and report the begin and the end."""
    try:
        stdin, stdout, report_fd = fds
        try:
            os.setsid()
            kernel.end_with(jail)
            stderr = os.open(os.devnull, os.O_WRONLY)
            _limit(setup)
        except OSError as error:
            os.write(report_fd, str(error).encode())
            return
        # No source descriptor is below its target: 0, 1 and 2 were open before these files.
        for number, fd in enumerate((stdin, stdout, stderr, report_fd)):
            os.dup2(fd, number)
        os.closerange(_REPORT + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        os.write(_REPORT, _BEGUN)
        _run(setup["program"], statements)
        os.write(_REPORT, secret)
    finally:
        os._exit(0)


def _limit(setup: dict[str, Any]) -> None:
    """Set hard limits of this process."""
    limits = {
        resource.RLIMIT_AS: setup["memory_mb"] << 20,
        resource.RLIMIT_FSIZE: setup["file_mb"] << 20,
        resource.RLIMIT_NOFILE: _MAX_OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    if setup["filter"]:  # only in a user namespace: otherwise all of the user's threads count
        limits[resource.RLIMIT_NPROC] = _MAX_THREADS
    for kind, most in limits.items():
        resource.setrlimit(kind, (most, most))
    cpu = math.ceil(setup["seconds_per_test"])
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
    if setup["filter"]:
        kernel.refuse_calls(bytes.fromhex(setup["filter"]))


def _run(program: str, statements: str | None) -> None:
    """Execute the program as a script, or as a module in which the test's statements run.

    A script ends as in Python: after its threads and exit functions.
    """
    name = "__main__" if statements is None else "program"
    module = sys.modules[name] = ModuleType(name)
    sys.argv[:] = ["program.py"]
    # Taken before the program runs, which may replace anything in this process.
    execute, stdout = exec, sys.stdout
    run_exit_functions = atexit._run_exitfuncs
    wait_for_threads = threading._shutdown  # type: ignore[attr-defined]
    code = compile(program, "program.py", "exec")
    test = compile(statements or "", "test.py", "exec")
    try:
        execute(code, vars(module))
    except SystemExit as end:
        if statements is not None or end.code not in (None, 0):
            raise
    execute(test, vars(module))
    if statements is None:
        wait_for_threads()
        run_exit_functions()
    for stream in (sys.stdout, stdout):
        with suppress(AttributeError, ValueError):  # None, closed or detached
            stream.flush()
