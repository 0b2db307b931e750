"""A user's modules and their checks, tried by another process first: they may end it or hang."""

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
    """A reward or environment that can tell before a run what its signature cannot."""

    def problems(self, key: str, args: dict[str, Any]) -> Iterable[str]:
        """What is wrong with `args`, which fit the signature, or with this machine.

        Args:
            key: the section that holds them as `args`, for messages.
            args: conf/reward's args.
        """
        ...


def check_import(key: str, path: str) -> None:
    """Raise a ConfigError unless the module of `path` ("package.module.name") can be imported.

    Another process tries, as modules may end their process, kill it or hang. Those of hybridrl and
    those that are imported already are not tried.
    """
    module = path.rpartition(".")[0]
    if not module or module in sys.modules or _is_ours(path):
        return
    problem = _import_problem(module, tuple(sys.path))
    if problem:
        raise ConfigError(
            f"{key} = {path}, but importing {module} failed: {problem}.\n"
            f"Modules are looked for in the current directory, PYTHONPATH and installed packages."
        )


def own_problems(key: str, path: str, found: object, args: dict[str, Any]) -> list[str]:
    """What `found`, which `path` names, says of its args; nothing unless it checks itself.

    Another process asks those that are not of hybridrl.
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


@functools.cache  # one that hangs is waited for once
def _import_problem(module: str, import_path: tuple[str, ...]) -> str:
    """Why a module cannot be imported; empty if it can. A changed import path is tried anew."""
    told = _tried(module)
    return told if isinstance(told, str) else ""


def _tried(module: str, question: Question | None = None) -> list[str] | str:
    """What `main` answers in another process: problems, or why the trial failed."""
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
        answer.seek(0)  # the offset is the writer's, too
        text = answer.read()
    return json.loads(text) if text else f"its process ended, {describe_exit(code)}"


def main(module: str, question: Question | None, fd: int, parent: int) -> None:
    """Import a module, ask for problems, and write them, or why that failed, to `fd` as JSON."""
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
    if os.getpid() == worker:  # no process that the module has forked
        os.write(fd, json.dumps(told).encode())
    os._exit(0)  # whatever threads the module has started
