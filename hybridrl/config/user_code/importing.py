"""Trial imports and checks of user code in a separate process: either may exit or hang."""

import functools
import importlib
import json
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

from hybridrl.config.errors import ConfigError
from hybridrl.config.user_code.supervisor import describe_exit, end, supervise

TRIAL_TIMEOUT_S = 120.0

_COMMAND = (
    "import pickle, sys; sys.path[:], module, question = pickle.load(sys.stdin.buffer); "
    "from hybridrl.config.user_code.importing import main; "
    "main(module, question, int(sys.argv[1]), int(sys.argv[2]))"
)
_MAX_CHARS = 1000

# Name of an object in the module, and the arguments of its `problems`.
Question = tuple[str, str, dict[str, Any]]


@runtime_checkable
class ChecksItself(Protocol):
    """A reward or environment with checks beyond those of its signature."""

    def problems(self, key: str, args: dict[str, Any]) -> Iterable[str]:
        """Return problems of `args`, which fit the signature, or of this machine.

        Args:
            key: the section that holds them as `args`, for messages.
            args: of conf/reward or conf/environment.
        """
        ...


def check_import(key: str, path: str) -> None:
    """Raise a ConfigError unless the module of `path` ("package.module.name") can be imported.

    A separate process tries the import; modules of hybridrl and imported ones need no trial.
    """
    module = path.rpartition(".")[0]
    if not module or module in sys.modules or _is_ours(path):
        return
    if reason := _tried_import(module, tuple(sys.path)):
        raise ConfigError(import_problem(key, path, reason))


def import_problem(key: str, path: str, reason: str) -> str:
    """Return the problem of a module that cannot be imported."""
    return (
        f"{key} = {path}, but importing {path.rpartition('.')[0]} failed: {reason}.\n"
        f"Modules are searched in the current directory, PYTHONPATH and installed packages."
    )


def own_problems(key: str, path: str, found: object, args: dict[str, Any]) -> list[str]:
    """Return the problems that `found`, named by `path`, reports of its args.

    A separate process runs checks of user code.
    """
    if not isinstance(found, ChecksItself):
        return []
    if _is_ours(path):
        return list(found.problems(key, args))
    module, _, name = path.rpartition(".")
    told = _tried(module, (name, key, args))
    if isinstance(told, list):
        return told
    return [f"{key}.function = {path}, but its check `problems` failed: {told}."]


def _is_ours(path: str) -> bool:
    return path.partition(".")[0] == "hybridrl"


@functools.cache  # wait only once for a module that hangs
def _tried_import(module: str, import_path: tuple[str, ...]) -> str:
    """Return the reason why a module cannot be imported; empty if it can."""
    told = _tried(module)
    return told if isinstance(told, str) else ""


def _tried(module: str, question: Question | None = None) -> list[str] | str:
    """Run `main` in a separate process; return the problems, or why the trial failed."""
    with os.fdopen(os.memfd_create("answer"), "rb") as answer:
        process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, str(answer.fileno()), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[answer.fileno()],
            process_group=0,
        )
        try:
            process.communicate(pickle.dumps((sys.path, module, question)), TRIAL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return f"it did not end within {TRIAL_TIMEOUT_S:g} s"
        finally:
            code = end(process)
        answer.seek(0)  # writer and reader share the offset
        text = answer.read()
    return json.loads(text) if text else f"its process ended, {describe_exit(code)}"


def main(module: str, question: Question | None, fd: int, parent: int) -> None:
    """Import a module, run a check, and write its problems, or the error, to `fd` as JSON."""
    supervise(parent, fd)
    worker = os.getpid()
    told: list[str] | str = []
    try:
        found = importlib.import_module(module)
        if question is not None:
            name, *arguments = question
            told = [str(problem) for problem in vars(found)[name].problems(*arguments)]
    except BaseException as error:
        text = traceback.format_exception_only(error)[-1].strip()[:_MAX_CHARS]
        told = text.encode(errors="backslashreplace").decode()
        if question is not None:
            last = traceback.extract_tb(error.__traceback__)[-1]
            told += f" ({last.filename}, line {last.lineno})"
    if os.getpid() == worker:  # not a process that the module has forked
        os.write(fd, json.dumps(told).encode())
    os._exit(0)  # despite threads that the module has started
