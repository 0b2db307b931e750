"""Trials of user code in a separate process: its import and its calls may raise, exit or hang."""

import functools
import importlib
import os
import sys
import time
import traceback
from collections.abc import Iterable
from multiprocessing.connection import wait
from typing import Any, Protocol, runtime_checkable

from hybridrl.config.errors import ConfigError, Problem, as_problem, shown
from hybridrl.config.user_code.files import file_of, module_and_name, module_of
from hybridrl.processes.process import ChildEnd, UserProcess
from hybridrl.processes.supervisor import describe_exit
from hybridrl.processes.texts import place_of, printable

TRIAL_TIMEOUT_S = 120.0
LOADING_TIMEOUT_S = 1800.0  # of data, perhaps a download

_MAX_CHARS = 1000

# Dotted path of a function of hybridrl that returns problems, and its arguments.
Check = tuple[str, tuple[Any, ...]]


@runtime_checkable
class ChecksItself(Protocol):
    """A reward or environment with checks beyond those of its signature."""

    def problems(self, key: str, args: dict[str, Any]) -> Iterable[Problem | str]:
        """Return problems of `args`, which fit the signature, or of this machine.

        Args:
            key: the section that holds them as `args`, for messages.
            args: of conf/reward or conf/environment.
        """
        ...


def check_import(key: str, path: str) -> None:
    """Raise a ConfigError unless the module of `path` can be imported.

    A separate process tries the import; modules of hybridrl and imported ones need no trial. With a
    file, something in it must be named, too.
    """
    if not module_of(path) or is_ours(path):
        return
    module, _ = module_and_name(key, path)
    if module in sys.modules:
        return
    if reason := _tried_import(module, tuple(sys.path)):
        raise ConfigError(import_problem(key, path, reason))


def import_problem(key: str, path: str, reason: str) -> Problem:
    """Return the problem of a module that cannot be imported."""
    module, remedy = module_of(path), ""
    if reason.startswith("ModuleNotFoundError"):
        remedy = "Modules are searched in the current directory, PYTHONPATH and installed packages"
    why = f"importing {file_of(module) or module} failed: {reason}"
    return Problem("import", key, path, why=why, remedy=remedy)


def try_out(
    key: str, path: str, what: str, function: str, *arguments: Any, always: bool = False
) -> list[Problem]:
    """Import the module of `path` and run a check of what it names; return the problems.

    Both happen in one separate process. Code of hybridrl needs no trial, unless `always`, which
    has more time as well.

    Args:
        key, path: of the config.
        what: the check in words, for messages.
        function: dotted path of the check, (key, path, *arguments) -> problems.
        arguments: of types of hybridrl or Python.

    Raises:
        ConfigError: the module cannot be imported.
    """
    if is_ours(path) and not always:
        return []
    module, _ = module_and_name(key, path)
    limit_s = LOADING_TIMEOUT_S if always else None
    imported, answer = _tried(module, (function, (key, path, *arguments)), limit_s)
    if isinstance(answer, list):
        return [Problem(*fields) for fields in answer]
    if not imported:
        raise ConfigError(import_problem(key, path, answer))
    return [Problem("trial", key, path, why=f"{what} failed: {answer}")]


def check_itself(key: str, path: str, code: object, args: dict[str, Any]) -> None:
    """Raise a ConfigError if `code`, named by `path`, reports problems of its args.

    A separate process runs checks of user code.
    """
    if not isinstance(code, ChecksItself):
        return
    if is_ours(path):
        problems = [*map(as_problem, code.problems(key, args))]
    else:
        check, function = "its check `problems`", f"{__name__}.problems_of"
        problems = try_out(f"{key}.function", path, check, function, key, args)
    if problems:
        raise ConfigError(*problems)


def problems_of(
    function_key: str, path: str, key: str, args: dict[str, Any]
) -> list[Problem | str]:
    """Ask user code for its problems, in a trial's process."""
    module, name = module_and_name(function_key, path)
    return [*vars(importlib.import_module(module))[name].problems(key, args)]


def is_ours(path: str) -> bool:
    """Return whether a path names code of hybridrl, or a built-in name."""
    return module_of(path).partition(".")[0] in ("", "hybridrl")


@functools.cache  # wait only once for a module that hangs
def _tried_import(module: str, import_path: tuple[str, ...]) -> str:
    """Return the reason why a module cannot be imported; empty if it can."""
    imported, answer = _tried(module)
    return "" if imported else str(answer)


def _tried(
    module: str, check: Check | None = None, limit_s: float | None = None
) -> tuple[bool, list[tuple[str, ...]] | str]:
    """Run `trial` in a separate process.

    Returns:
        Whether the module was imported; and the problems, or why the import or check failed.
    """
    answers: list[Any] = []
    limit_s = TRIAL_TIMEOUT_S if limit_s is None else limit_s
    end, why = time.monotonic() + limit_s, ""
    process = UserProcess(f"{__name__}.trial", os.environ, is_silent=True)
    try:
        process.send((module, check), TRIAL_TIMEOUT_S)
        while wait([process.socket], max(0.0, end - time.monotonic())):
            answers += process.messages()
        why = f"it did not end within {limit_s:g} s"
    except (EOFError, OSError):
        pass
    finally:
        code = process.end()
    answers.append(why or f"its process ended, {describe_exit(code)}")
    return (True, answers[1]) if answers[0] == [] else (False, answers[0])


def trial(link: ChildEnd) -> None:
    """Import a module and run a check; send the problems or the error of each. See `_tried`."""
    module, check = link.receive()
    try:
        importlib.import_module(module)
        link.send([])
        if check is not None:
            link.send(_problems(*check))
    except BaseException as error:
        link.send(_described(error))


def _problems(function: str, arguments: tuple[Any, ...]) -> list[tuple[str, ...]]:
    """Call a check; the problems of a ConfigError are its answer, too."""
    module, _, name = function.rpartition(".")
    try:
        problems = [*map(as_problem, vars(importlib.import_module(module))[name](*arguments))]
    except ConfigError as error:
        problems = error.problems
    return [(p.id, p.key, shown(p.value), p.expected, p.why, p.remedy) for p in problems]


def _described(error: BaseException) -> str:
    """Return an error in one line, with the last line of user code that led to it."""
    text = traceback.format_exception_only(error)[-1].strip()[:_MAX_CHARS]
    file, line = place_of(error) or ("", 0)
    place = f" ({file}, line {line})" if file else ""
    return printable(text + place)
