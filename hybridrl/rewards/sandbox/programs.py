"""Runs programs that nobody has read: in bubblewrap, limited and cut off.

docs/rewards.md says what is kept from a program and what is not.
"""

import io
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hybridrl.rewards.sandbox.bubblewrap import SandboxError, own_folder, start_in_bubblewrap
from hybridrl.rewards.sandbox.call_filter import call_filter

# For the start of bubblewrap and Python, on a busy machine; and for the end of a test.
_START_S, _GRACE_S = 30.0, 10.0
_HERE = Path(__file__).resolve().parent
_COMMAND = (
    "import sys; sys.path.insert(0, sys.argv[1]); from hybridrl.rewards.sandbox.jail import main; "
    "del sys.path[0]; main(*sys.argv[2:])"
)
_MAX_ANSWER_BYTES = 4096  # what a pipe takes in one piece
_MODULES = tuple(str(_HERE / name) for name in ("jail.py", "kernel.py"))


class Isolation(StrEnum):
    """What keeps a program from the rest of the machine, besides its limits."""

    bubblewrap = "bubblewrap"
    none = "none"


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
        file_mb: MiB of one file and of the output; in bubblewrap also of all files together.
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
        cases: the tests; each runs in a fresh process.
        limits: what each may use.
        isolation: what keeps the program from the rest of the machine.
        stop_at_failure: count the tests behind the first failure as failed, without running them.

    Raises:
        SandboxError: the isolation is not to be had here; nothing was run.
    """
    outcomes: list[Outcome] = []
    with _started(isolation) as jail:
        setup = asdict(limits) | {"program": program}
        setup["filter"] = call_filter().hex() if isolation is Isolation.bubblewrap else ""
        jail.begin(setup)
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
    """A started hybridrl.rewards.sandbox.jail.

    Args:
        process: it, or the bubblewrap around it.
        stdin, stdout: files of the tests, which the process has, too.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], stdin: io.FileIO, stdout: io.FileIO
    ) -> None:
        self._process, self._stdin, self._stdout = process, stdin, stdout

    def begin(self, setup: dict[str, Any]) -> None:
        """Hand over the program.

        Raises:
            SandboxError: the process has not started, or not in time.
        """
        if self._ask(setup, _START_S) != "ready":
            self.end()
            assert self._process.stderr is not None
            told = self._process.stderr.read().decode(errors="replace").strip()
            raise SandboxError(told.rpartition("\n")[2] or f"no answer within {_START_S:g} s")

    def outcome(self, case: Case, seconds: float) -> Outcome:
        """Run the program with one test. A program that ends its sandbox has failed."""
        _fill(self._stdin, case.stdin.encode(errors="replace"))
        _fill(self._stdout, b"")
        request = {"statements": case.statements, "seconds": seconds}
        word, _, told = self._ask(request, seconds + _GRACE_S).partition(" ")
        if word == "error":
            raise SandboxError(told)
        if word not in list(Outcome):
            self.end()
            return Outcome.failed
        if word == Outcome.passed and case.statements is None:
            self._stdout.seek(0)
            return Outcome.passed if _same(self._stdout.readall(), case.stdout) else Outcome.failed
        return Outcome(word)

    def end(self) -> None:
        """Kill the process, and with it all that is in bubblewrap."""
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _ask(self, request: dict[str, Any], timeout_s: float) -> str:
        """Return the answer; "" if there is none in time."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):  # what is read then is the end
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
    """Compare outputs but for white space at the ends of lines and of the whole."""

    def lines(text: str) -> list[str]:
        return [line.rstrip() for line in text.rstrip().split("\n")]

    return lines(found.decode(errors="replace")) == lines(expected)


@contextmanager
def _started(isolation: Isolation) -> Iterator[_Jail]:
    """Start a jail, and end it at last."""
    with ExitStack() as stack:
        stdin, stdout = (
            stack.enter_context(io.FileIO(os.memfd_create(name), "r+"))
            for name in ("stdin", "stdout")
        )
        empty = stack.enter_context(TemporaryDirectory(ignore_cleanup_errors=True))
        files = [stdin.fileno(), stdout.fileno()]

        def start(command: list[str], descriptors: list[int]) -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                cwd=empty,
                env={},
                pass_fds=[*files, *descriptors],
                process_group=0,
            )

        command = [sys.executable, "-I", "-c", _COMMAND, str(_HERE.parents[2]), *map(str, files)]
        if isolation is Isolation.none:
            process = start([*command, str(os.getpid())], [])
        else:
            folder = own_folder(_MODULES)
            process = start_in_bubblewrap(start, [*command, "0", folder], folder, _MODULES)
        stack.enter_context(process)
        jail = _Jail(process, stdin, stdout)
        stack.callback(jail.end)
        yield jail
