"""Runner of untrusted programs: in bubblewrap, with limits on time, memory and files.

docs/rewards.md lists the protections and their gaps.
"""

import json
import os
import signal
import sys
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from tempfile import TemporaryDirectory
from typing import Any

from hybridrl.rewards.sandbox.bubblewrap import SandboxError, call_filter, start_in_bubblewrap
from hybridrl.rewards.sandbox.jail import digest

# Time limits of the start of bubblewrap and Python on a busy machine, and of the end of a test.
_START_S, _GRACE_S = 30.0, 10.0
_PACKAGE = Path(__file__).resolve().parents[2]
_COMMAND = (
    "import sys; sys.path.insert(0, sys.argv[1]); from hybridrl.rewards.sandbox.jail import main; "
    "del sys.path[0]; main(*sys.argv[2:])"
)
_MODULES = [str(_PACKAGE / name) for name in ("rewards/sandbox/jail.py", "processes/kernel.py")]


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
        stop_at_failure: count the tests after the first failure as failed, without running them;
            a wrong output alone does not stop them.

    Raises:
        SandboxError: the isolation does not work on this machine; the program was not run.
    """
    names = ("stdin", "statements")
    setup = asdict(limits) | {
        "program": program,
        "filter": call_filter().hex() if isolation is Isolation.bubblewrap else "",
        "tests": [{name: vars(case)[name] for name in names} for case in cases],
        "stop_at_failure": stop_at_failure,
    }
    timeout_s = _START_S + limits.seconds + _GRACE_S
    code, output, errors = _run_jail(isolation, json.dumps(setup).encode(), timeout_s)
    ready, *answers = output.decode().splitlines() or [""]
    if ready != "ready" or code == 1:  # an exception in the jail
        error = errors.decode(errors="replace").strip().rpartition("\n")[2]
        raise SandboxError(error or f"no answer within {timeout_s:g} s")
    outcomes = [Outcome.failed] * len(cases)  # also of tests whose program has ended its jail
    for place, answer in enumerate(answers):
        outcome, printed = json.loads(answer)
        case = cases[place]
        if (
            outcome != Outcome.passed
            or case.statements is not None
            or printed == digest(case.stdout)
        ):
            outcomes[place] = Outcome(outcome)
    return outcomes


def _run_jail(isolation: Isolation, setup: bytes, timeout_s: float) -> tuple[int, bytes, bytes]:
    """Run hybridrl.rewards.sandbox.jail; return its exit code, output and errors."""
    command = [sys.executable, "-I", "-c", _COMMAND, str(_PACKAGE.parent)]
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), PIPE)
        options: dict[str, Any] = {**pipes, "cwd": folder, "env": {}, "process_group": 0}
        if isolation is Isolation.none:
            process = Popen([*command, str(os.getpid())], **options)
        else:
            process = start_in_bubblewrap(command, _MODULES, **options)
        with process:
            try:
                output, errors = process.communicate(setup, timeout_s)
            except TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                output, errors = process.communicate()
            finally:
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
            return process.returncode, output, errors
