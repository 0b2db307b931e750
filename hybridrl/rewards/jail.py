"""The inside of the sandbox: runs a program with each of its tests in a process without rights.

    caller -> this process -> (namespaces) its child, process 1 in there -> one process per test

It is started by `hybridrl.rewards.sandbox` with `python -I` and no environment, reads a Request
from stdin and writes a Reply to stdout, as JSON. No code under test runs in the processes that
judge: a test's process tells that it came to its end by a secret that the judge made for it.
"""

import json
import math
import os
import resource
import select
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from io import FileIO
from pathlib import Path
from types import ModuleType
from typing import Any

from hybridrl.rewards import kernel
from hybridrl.rewards.landlock import landlock_version, read_only_these
from hybridrl.rewards.syscall_filter import install_filter

_SECRET_BYTES = 16
# What a test's process reports, behind its stderr: that it begins, then the secret; or an error.
_REPORT, _BEGUN, _MAX_REPORT_BYTES = 3, b"begun:", 4096
_MAX_OPEN_FILES = 64
# What programs need besides Python: libraries, time zones, devices that hold nothing.
_READABLE = (
    *("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime"),
    *("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"),
)
# Where the folder in memory may be laid over: what lies there is not to be seen in the sandbox.
_FOLDERS = ("/dev/shm", "/tmp", "/mnt")


class Isolation(StrEnum):
    """What keeps a program from the rest of the machine, besides its limits."""

    namespace = "namespace"
    filter = "filter"


class Outcome(StrEnum):
    """How a program did in one test."""

    passed = "passed"
    failed = "failed"
    timeout = "timeout"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a program may use.

    Attributes:
        seconds_per_test: of wall time and, rounded up, of CPU time in each test.
        seconds: of wall time in all tests; those that were not begun count as timeouts.
        memory_mb: MiB of address space, the interpreter's own included.
        file_mb: MiB of one file and of the output; in the namespace also of all files together.
    """

    seconds_per_test: float
    seconds: float
    memory_mb: int
    file_mb: int


@dataclass(frozen=True, kw_only=True)
class Case:
    """One test: statements to run behind the program, or its input and the output expected."""

    statements: str | None = None
    stdin: str = ""
    stdout: str = ""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to run: a program with each of its tests, up to the first failure if asked for."""

    program: str
    cases: list[Case]
    limits: Limits
    isolation: Isolation
    stop_at_failure: bool

    def to_json(self) -> bytes:
        """As it goes to the sandbox."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "Request":
        """As it comes out there."""
        found = json.loads(text)
        found["cases"] = [Case(**case) for case in found["cases"]]
        found["limits"] = Limits(**found["limits"])
        found["isolation"] = Isolation(found["isolation"])
        return cls(**found)


def main(parent: int) -> None:
    """Serve one request; `parent` is the caller's process id."""
    kernel.die_with(parent)
    os.environ.clear()
    request = Request.from_json(FileIO(0, closefd=False).readall())
    reply: dict[str, Any]
    try:
        if request.isolation is Isolation.namespace:
            _enter_namespaces(request.limits)
        else:
            os.chdir(tempfile.gettempdir())
        reply = {"outcomes": _judge(request)}
    except OSError as error:
        reply = {"error": str(error)}
    FileIO(1, "w", closefd=False).write(json.dumps(reply).encode())
    os._exit(0)


def _enter_namespaces(limits: Limits) -> None:
    """Go on as process 1 of new namespaces; the process that was here waits for its end."""
    held, dropped = os.pipe()
    kernel.leave_namespaces()
    child = os.fork()
    if child != 0:
        os.close(held)
        os.waitpid(child, 0)
        os._exit(0)
    os.close(dropped)
    # In here the parent has no id to compare; that the pipe is held tells that it lives.
    kernel.die_with_parent()
    if select.select([held], [], [], 0)[0]:
        os._exit(1)
    kernel.mount_memory("/proc", 1)
    kernel.make_files_read_only()
    folder = next(folder for folder in _FOLDERS if _is_free(folder))
    kernel.mount_memory(folder, limits.file_mb)
    os.chdir(folder)


def _is_free(folder: str) -> bool:
    """Whether a folder is there and Python does not live below it."""
    homes = {sys.prefix, sys.base_prefix, *sys.path}
    return os.path.isdir(folder) and not any(Path(home).is_relative_to(folder) for home in homes)


def _judge(request: Request) -> list[Outcome]:
    """The outcome of each test."""
    limits, end = request.limits, time.monotonic() + request.limits.seconds
    outcomes: list[Outcome] = []
    for case in request.cases:
        seconds = min(limits.seconds_per_test, end - time.monotonic())
        failed = any(outcome is not Outcome.passed for outcome in outcomes)
        if seconds <= 0 or (failed and request.stop_at_failure):
            left = len(request.cases) - len(outcomes)
            return [*outcomes, *[Outcome.timeout if seconds <= 0 else Outcome.failed] * left]
        outcomes.append(_outcome(request, case, seconds))
    return outcomes


def _outcome(request: Request, case: Case, seconds: float) -> Outcome:
    """Run the program with one test."""
    secret = os.urandom(_SECRET_BYTES)
    told, tell = os.pipe()
    with tempfile.TemporaryFile(dir=".") as stdin, tempfile.TemporaryFile(dir=".") as stdout:
        stdin.write(case.stdin.encode())
        stdin.seek(0)
        judge = os.getpid()
        child = os.fork()
        if child == 0:
            _become_program(request, case, (stdin.fileno(), stdout.fileno(), tell), judge, secret)
        os.close(tell)
        in_time, status = _wait(child, seconds)
        report = os.read(told, _MAX_REPORT_BYTES)
        os.close(told)
        if not in_time or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU):
            return Outcome.timeout
        if not report.startswith(_BEGUN):
            raise OSError(report.decode() or "a process ended before it began")
        stdout.seek(0)
        is_right = case.statements is not None or _same(stdout.read(), case.stdout)
        return Outcome.passed if report == _BEGUN + secret and is_right else Outcome.failed


def _wait(child: int, seconds: float) -> tuple[bool, int]:
    """Whether `child` ended by itself in time, and its status; else it is killed."""
    watched = os.pidfd_open(child)
    in_time = bool(select.select([watched], [], [], seconds)[0])
    os.close(watched)
    if not in_time:
        os.kill(child, signal.SIGKILL)
    return in_time, os.waitpid(child, 0)[1]


def _same(found: bytes, expected: str) -> bool:
    """Whether outputs are equal but for white space at the ends of lines and of the whole."""

    def lines(text: str) -> list[str]:
        return [line.rstrip() for line in text.rstrip().split("\n")]

    return lines(found.decode(errors="replace")) == lines(expected)


def _become_program(
    request: Request, case: Case, fds: tuple[int, int, int], judge: int, secret: bytes
) -> None:
    """Give up every right, run the program and its test, and report how far that came."""
    try:
        kernel.die_with(judge)
        # All sources lie above the last target: `told` was opened before them.
        for number, fd in enumerate((*fds[:2], os.open(os.devnull, os.O_WRONLY), fds[2])):
            os.dup2(fd, number)
        os.closerange(_REPORT + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        try:
            _limit(request.limits)
            kernel.drop_rights()
            _hide_files(request.isolation)
            install_filter(may_write=request.isolation is Isolation.namespace)
        except OSError as error:
            os.write(_REPORT, str(error).encode())
            return
        os.write(_REPORT, _BEGUN)
        _run(request.program, case.statements)
        sys.stdout.flush()
        os.write(_REPORT, secret)
    finally:
        os._exit(0)


def _hide_files(isolation: Isolation) -> None:
    """Leave nothing to be read but Python, the system's libraries and the program's own folder."""
    if isolation is Isolation.filter and landlock_version() == 0:
        return
    own = os.getcwd() if isolation is Isolation.namespace else None
    read_only_these([*_READABLE, sys.prefix, sys.base_prefix], own)


def _limit(limits: Limits) -> None:
    """Set the limits of this process, for good."""
    mb = 2**20
    cpu = math.ceil(limits.seconds_per_test)
    for kind, most in (
        (resource.RLIMIT_AS, limits.memory_mb * mb),
        (resource.RLIMIT_FSIZE, limits.file_mb * mb),
        (resource.RLIMIT_NOFILE, _MAX_OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))


def _run(program: str, statements: str | None) -> None:
    """Execute the program as a script, or as a module whose names the test's statements see."""
    name = "__main__" if statements is None else "program"
    module = sys.modules[name] = ModuleType(name)
    try:
        exec(compile(program, "program.py", "exec"), vars(module))
    except SystemExit as end:
        if statements is not None or end.code not in (None, 0):
            raise
    if statements is not None:
        exec(compile(statements, "test.py", "exec"), vars(module))
