"""Trial import of a user's module in a separate process: an import may exit or hang."""

import functools
import importlib
import json
import os
import select
import subprocess
import sys
import traceback

from hybridrl.config.errors import ConfigError
from hybridrl.config.user_code.supervisor import describe_exit, end, supervise

IMPORT_TIMEOUT_S = 120.0

_COMMAND = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from hybridrl.config.user_code.importing import main; "
    "main(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))"
)
_MAX_CHARS = 1000
_IMPORTED = b"+"


def check_import(key: str, path: str) -> None:
    """Raise a ConfigError unless the module of `path` ("package.module.name") can be imported.

    A separate process tries the import; modules of hybridrl and imported ones need no trial.
    """
    module = path.rpartition(".")[0]
    if not module or module in sys.modules or module.partition(".")[0] == "hybridrl":
        return
    problem = _problem(module, tuple(sys.path))
    if problem:
        raise ConfigError(
            f"{key} = {path}, but importing {module} failed: {problem}.\n"
            f"Modules are searched in the current directory, PYTHONPATH and installed packages."
        )


@functools.cache  # wait only once for a module that hangs
def _problem(module: str, import_path: tuple[str, ...]) -> str:
    """Return the reason why a module cannot be imported; empty if it can."""
    ours, theirs = os.pipe()
    with os.fdopen(ours, "rb", buffering=0) as pipe:
        arguments = [json.dumps(import_path), module, str(theirs), str(os.getpid())]
        process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs],
            process_group=0,
        )
        os.close(theirs)
        try:
            ready, _, _ = select.select([pipe], [], [], IMPORT_TIMEOUT_S)
            text = pipe.read(4 * _MAX_CHARS) if ready else b""
        finally:
            code = end(process)
    if not ready:
        return f"it did not end within {IMPORT_TIMEOUT_S:g} s"
    if not text:
        return f"its process ended, {describe_exit(code)}"
    return "" if text == _IMPORTED else text.decode(errors="backslashreplace")


def main(module: str, fd: int, parent: int) -> None:
    """Import a module and write _IMPORTED, or why that failed, to `fd`."""
    supervise(parent, fd)
    worker = os.getpid()
    try:
        importlib.import_module(module)
        result = _IMPORTED
    except BaseException as error:
        text = traceback.format_exception_only(error)[-1].strip()
        result = text[:_MAX_CHARS].encode(errors="backslashreplace")
    if os.getpid() == worker:  # not a process that the module has forked
        os.write(fd, result)
    os._exit(0)  # despite threads that the module has started
