"""Bubblewrap around programs under test: visible files, namespaces and user."""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from subprocess import Popen
from typing import Any

_OPTIONS = (
    *("--unshare-user", "--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1"),
    # For the jail's mount of the program's folder; dropped before any program runs.
    *("--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN"),
)
# Root's jail changes to user nobody: the kernel does not limit the threads of root.
_OPTIONS_OF_ROOT = ("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
_IDS_OF_ROOT = "0 0 1\n65534 65534 1\n"
# Read-only: Python and the system's libraries.
_PREFIXES = dict.fromkeys((sys.prefix, sys.base_prefix, "/usr", ""))
_SEEN = (
    *(f"{prefix}/lib{bits}" for prefix in _PREFIXES for bits in ("", "32", "64")),
    *(sys.executable, f"{sys.prefix}/pyvenv.cfg"),
    *("/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo"),
)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_FOLDERS = ("/tmp", "/var/tmp", "/mnt")


class SandboxError(RuntimeError):
    """Sandbox that cannot be set up on this machine, not caused by a program."""


def start_in_bubblewrap(
    command: list[str], seen: Sequence[str], files: list[int], **options: Any
) -> Popen[bytes]:
    """Start a command as process 1 of new namespaces of every kind.

    Args:
        command: sees Python, the system's libraries, three devices and `seen`. It gets two more
            arguments: its parent, 0, and the mount point of the program's folder.
        seen: additional visible files.
        files: inherited descriptors.
        options: of `Popen`.

    Raises:
        SandboxError: bubblewrap is not installed.
    """
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxError("there is no program bwrap on the PATH")
    wrapped = [program, *_OPTIONS]
    paths = [Path(path) for path in (*_SEEN, *seen)]
    for path in paths:
        wrapped += ["--dir", str(path.parent), "--ro-bind-try", str(path), str(path)]
    wrapped += ["--dir", "/dev"]
    for device in _DEVICES:
        wrapped += ["--dev-bind", device, device]
    # It hides no visible file.
    folder = next(f for f in _FOLDERS if not any(path.is_relative_to(f) for path in paths))
    wrapped += ["--dir", folder, "--remount-ro", "/"]
    command = [*command, "0", folder]
    if os.geteuid() != 0:
        return Popen([*wrapped, *command], pass_fds=files, **options)
    with ExitStack() as stack:
        info, info_end, block, _ = (
            stack.enter_context(os.fdopen(fd, mode))
            for fd, mode in zip((*os.pipe(), *os.pipe()), "rwrw", strict=True)
        )
        numbers = [info_end.fileno(), block.fileno()]
        wrapped += [*_OPTIONS_OF_ROOT, "--info-fd", str(numbers[0])]
        wrapped += ["--userns-block-fd", str(numbers[1])]
        process = Popen([*wrapped, *command], pass_fds=[*files, *numbers], **options)
        info_end.close()
        with suppress(json.JSONDecodeError, OSError):  # bubblewrap reports the error on stderr
            child = json.loads(info.read())["child-pid"]
            for kind in ("uid_map", "gid_map"):
                Path(f"/proc/{child}/{kind}").write_text(_IDS_OF_ROOT)
        return process  # it starts when the block pipe is closed
