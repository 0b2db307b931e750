"""Texts of user code: tracebacks, cut to the user's frames, and lines fit for a log."""

import os
import sysconfig
import textwrap
import traceback
from collections.abc import Iterator
from pathlib import Path

MAX_CHARS = 4000
_OURS = str(Path(__file__).parents[1]) + os.sep
_PYTHON = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def user_traceback(error: BaseException) -> str:
    """Return an error's traceback, and those of its causes, without frames of libraries.

    An error that no frame of the user led to keeps those of installed packages, but for hybridrl.
    """
    summary = traceback.TracebackException.from_exception(error, compact=True)
    for each in _all(summary):
        own = [frame for frame in each.stack if not _is_machinery(frame.filename)]
        user = [frame for frame in own if not _is_installed(frame.filename)]
        each.stack = traceback.StackSummary.from_list(user or own)
    return "".join(summary.format())[-MAX_CHARS:]


def last_frame(trace: str) -> str:
    """Return file, line and function of the last frame in a traceback; empty without frames."""
    lines = [line.strip() for line in trace.splitlines()]
    return next((line for line in reversed(lines) if line.startswith('File "')), "")


def printable(text: str) -> str:
    r"""Return a text as one line, with tabs as spaces and all that is not printable escaped.

    Such are line ends (\n), sequences that a terminal obeys (\x1b) and changes of the direction of
    text (\u202e). So are lone surrogates (\ud800), which files cannot encode.
    """
    escaped = (c if c.isprintable() else ascii(c)[1:-1] for c in text.expandtabs())
    return "".join(escaped)


def printable_lines(text: str) -> str:
    """Return lines, each printable and indented, so that none looks like the log's own."""
    return textwrap.indent("\n".join(map(printable, text.rstrip().split("\n"))), "  ")


def _all(summary: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    """Yield an error, its causes and the members of its groups."""
    yield summary
    for other in (summary.__cause__, summary.__context__, *(summary.exceptions or ())):
        if other is not None:
            yield from _all(other)


def place_of(error: BaseException) -> tuple[str, int | None] | None:
    """Return file and line of the user's code that led to an error; None if there is none."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return error.filename, error.lineno
    frames = reversed(traceback.extract_tb(error.__traceback__))
    own = (frame for frame in frames if not _is_machinery(frame.filename))
    return next(((f.filename, f.lineno) for f in own if not _is_installed(f.filename)), None)


def _is_installed(filename: str) -> bool:
    return any(part in filename for part in _INSTALLED)


def _is_machinery(filename: str) -> bool:
    """Return whether a file belongs to hybridrl or Python itself."""
    is_python = filename.startswith((_PYTHON, "<frozen")) and not _is_installed(filename)
    return is_python or filename.startswith(_OURS)
