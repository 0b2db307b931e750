"""Runner of untrusted programs: in bubblewrap, with limits on time, memory and files.

docs/rewards.md lists the protections and their gaps.
"""

import io
import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from subprocess import PIPE, Popen
from tempfile import TemporaryDirectory
from typing import Any

from hybridrl.rewards.sandbox.bubblewrap import SandboxError, start_in_bubblewrap
from hybridrl.rewards.sandbox.call_filter import call_filter

# Time limits of the start of bubblewrap and Python on a busy machine, and of the end of a test.
_START_S, _GRACE_S = 30.0, 10.0
_PACKAGE = Path(__file__).resolve().parents[2]
_COMMAND = (
    "import sys; sys.path.insert(0, sys.argv[1]); from hybridrl.rewards.sandbox.jail import main; "
    "del sys.path[0]; main(*sys.argv[2:])"
)
_MAX_ANSWER_BYTES = 4096  # atomic write of a pipe
_MODULES = tuple(
    str(_PACKAGE / name) for name in ("rewards/sandbox/jail.py", "config/user_code/kernel.py")
)


class Isolation(StrEnum):
    """Isolation of a program from the machine, besides its limits."""

    bubblewrap = "bubblewrap"
    none = "none"


class Outcome(StrEnum):
    """Outcome of one test."""

    passed = "passed"
    failed = "failed"
    timeout = "timeout"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a program.

    Attributes:
        seconds_per_test: wall time and, rounded up, CPU time of each test.
        seconds: wall time of all tests; tests that were not started count as timeouts.
        memory_mb: MiB of address space, including the interpreter.
        file_mb: MiB of one file and of the output; in bubblewrap also of all files together.
    """

    seconds_per_test: float
    seconds: float
    memory_mb: int
    file_mb: int


@dataclass(frozen=True, kw_only=True)
class Case:
    """Test: statements to run after the program, or its stdin and expected stdout."""

    statements: str | None = None
    stdin: str = ""
    stdout: str = ""


def run_tests(
    program: str,
    cases: list[Case],
    limits: Limits,
    isolation: Isolation,
    *,
    stop_at_failure: bool = False,
) -> list[Outcome]:
    """Run a program with each of its tests.

    Args:
        program: Python source.
        cases: the tests; each runs in a new process.
        limits, isolation: of the program.
        stop_at_failure: count the tests after the first failure as failed, without running them.

    Raises:
        SandboxError: the isolation does not work on this machine; the program was not run.
    """
    outcomes: list[Outcome] = []
    with _started(isolation, asdict(limits) | {"program": program, "filter": ""}) as jail:
        end = time.monotonic() + limits.seconds
        for case in cases:
            seconds = min(limits.seconds_per_test, end - time.monotonic())
            has_failed = any(outcome is not Outcome.passed for outcome in outcomes)
            if seconds <= 0 or (has_failed and stop_at_failure):
                rest = Outcome.timeout if seconds <= 0 else Outcome.failed
                return [*outcomes, *[rest] * (len(cases) - len(outcomes))]
            outcomes.append(jail.outcome(case, seconds))
    return outcomes


class _Jail:
    """Handle of a process that runs hybridrl.rewards.sandbox.jail.

    Args:
        process: the process, or bubblewrap around it.
        stdin, stdout: files of the tests, shared with the process.
    """

    def __init__(self, process: Popen[bytes], stdin: io.FileIO, stdout: io.FileIO) -> None:
        self._process, self._stdin, self._stdout = process, stdin, stdout

    def outcome(self, case: Case, seconds: float) -> Outcome:
        """Run the program with one test. A program that ends its sandbox fails."""
        _fill(self._stdin, case.stdin.encode(errors="replace"))
        _fill(self._stdout, b"")
        request = {"statements": case.statements, "seconds": seconds}
        word, _, error = self.ask(request, seconds + _GRACE_S).partition(" ")
        if word == "error":
            raise SandboxError(error)
        if word not in list(Outcome):
            self.end()
            return Outcome.failed
        if word == Outcome.passed and case.statements is None:
            self._stdout.seek(0)
            return Outcome.passed if _same(self._stdout.readall(), case.stdout) else Outcome.failed
        return Outcome(word)

    def end(self) -> None:
        """Kill the process and everything in its bubblewrap."""
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def ask(self, request: dict[str, Any], timeout_s: float) -> str:
        """Send a request and return the answer; "" after a timeout."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):  # the read below then returns ""
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
        answers = self._process.stdout.fileno()
        if not select.select([answers], [], [], timeout_s)[0]:
            return ""
        return os.read(answers, _MAX_ANSWER_BYTES).decode().strip()


def _fill(file: io.FileIO, content: bytes) -> None:
    file.seek(0)
    file.truncate()
    file.write(content)
    file.seek(0)


def _same(found: bytes, expected: str) -> bool:
    """Compare outputs, ignoring white space at the end of lines and of the whole."""

    def lines(text: str) -> list[str]:
        return [line.rstrip() for line in text.rstrip().split("\n")]

    return lines(found.decode(errors="replace")) == lines(expected)


@contextmanager
def _started(isolation: Isolation, setup: dict[str, Any]) -> Iterator[_Jail]:
    """Start a jail and send it the program and its limits; end it on exit.

    Raises:
        SandboxError: it did not start in time.
    """
    with ExitStack() as stack:
        stdin, stdout = (
            stack.enter_context(io.FileIO(os.memfd_create(name), "r+"))
            for name in ("stdin", "stdout")
        )
        files = [stdin.fileno(), stdout.fileno()]
        command = [sys.executable, "-I", "-c", _COMMAND, str(_PACKAGE.parent), *map(str, files)]
        options: dict[str, Any] = {
            **dict.fromkeys(("stdin", "stdout", "stderr"), PIPE),
            "bufsize": 0,
            "cwd": stack.enter_context(TemporaryDirectory(ignore_cleanup_errors=True)),
            "env": {},
            "process_group": 0,
        }
        if isolation is Isolation.none:
            process = Popen([*command, str(os.getpid())], pass_fds=files, **options)
        else:
            setup["filter"] = call_filter().hex()
            process = start_in_bubblewrap(command, _MODULES, files, **options)
        stack.enter_context(process)
        jail = _Jail(process, stdin, stdout)
        stack.callback(jail.end)
        if jail.ask(setup, _START_S) != "ready":
            jail.end()
            assert process.stderr is not None
            error = process.stderr.read().decode(errors="replace").strip()
            raise SandboxError(error.rpartition("\n")[2] or f"no answer within {_START_S:g} s")
        yield jail
