"""Runs programs that nobody has read: in processes of their own, limited and cut off.

See docs/rewards.md for what is kept from a program and what is not.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from hybridrl.rewards.jail import Case, Isolation, Limits, Outcome, Request

# For the start of Python and the namespaces, on a busy machine.
_START_S = 30.0
_COMMAND = (
    "import sys; sys.path.insert(0, sys.argv[1]); from hybridrl.rewards.jail import main; "
    "del sys.path[0]; main(int(sys.argv[2]))"
)


class SandboxError(RuntimeError):
    """The sandbox cannot be set up here, or broke; no program is to blame."""


def run_tests(
    program: str,
    cases: list[Case],
    limits: Limits,
    isolation: Isolation,
    *,
    stop_at_failure: bool = False,
) -> list[Outcome]:
    """How `program` does in each of its tests.

    Args:
        program: Python source.
        cases: the tests; each runs in a fresh process.
        limits: what each may use.
        isolation: what keeps the program from the rest of the machine.
        stop_at_failure: count the tests behind the first failure as failed, without running them.

    Raises:
        SandboxError: the isolation is not to be had here; nothing was run.
    """
    request = Request(
        program=program,
        cases=cases,
        limits=limits,
        isolation=isolation,
        stop_at_failure=stop_at_failure,
    )
    text = _answer(request)
    reply = json.loads(text) if text else {"error": "its process ended without an answer"}
    if "error" in reply:
        raise SandboxError(f"isolation {isolation}: {reply['error']}")
    return [Outcome(outcome) for outcome in reply["outcomes"]]


def _answer(request: Request) -> bytes:
    """What the sandbox writes; it, and all that it started, has ended then."""
    root = str(Path(__file__).resolve().parents[2])
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", _COMMAND, root, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd="/",
        env={},
        process_group=0,
    )
    try:
        timeout = request.limits.seconds + _START_S
        return process.communicate(request.to_json(), timeout=timeout)[0]
    except subprocess.TimeoutExpired as error:
        raise SandboxError(f"no answer within {timeout:g} s") from error
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
