"""Isolation of programs under test: files, namespaces and user of bubblewrap, system calls."""

import ctypes
import errno
import functools
import json
import os
import shutil
import struct
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

_LIBRARY = "libseccomp.so.2"
_PROCESSES = ("fork", "vfork", "execve", "execveat", "unshare", "setns")
_SOCKETS = ("socket",)  # mainly vsock; socketpair is allowed
_MEMORY = ("memfd_create", "shmget", "semget", "msgget")
_KEYS = ("add_key", "keyctl", "request_key")
_KERNEL = ("bpf", "io_uring_setup", "perf_event_open", "syslog", "userfaultfd")
REFUSED = (*_PROCESSES, *_SOCKETS, *_MEMORY, *_KEYS, *_KERNEL)

# seccomp.h, linux/sched.h, linux/close_range.h
_ALLOW, _ERRNO, _NO_SUCH_CALL = 0x7FFF0000, 0x00050000, -1
_NOT_EQUAL, _MASKED_EQUAL = 1, 7
_CLONE_FILES, _CLONE_THREAD = 0x00000400, 0x00010000
_CLOSE_RANGE_UNSHARE = 2


class SandboxError(RuntimeError):
    """Sandbox that cannot be set up on this machine, not caused by a program."""


def start_in_bubblewrap(command: list[str], seen: Sequence[str], **options: Any) -> Popen[bytes]:
    """Start a command as process 1 of new namespaces of every kind.

    Args:
        command: sees Python, the system's libraries, three devices and `seen`. It gets two more
            arguments: its parent, 0, and the mount point of the program's folder.
        seen: additional visible files.
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
        return Popen([*wrapped, *command], **options)
    with ExitStack() as stack:
        info, info_end, block, _ = (
            stack.enter_context(os.fdopen(fd, mode))
            for fd, mode in zip((*os.pipe(), *os.pipe()), "rwrw", strict=True)
        )
        numbers = [info_end.fileno(), block.fileno()]
        wrapped += [*_OPTIONS_OF_ROOT, "--info-fd", str(numbers[0])]
        wrapped += ["--userns-block-fd", str(numbers[1])]
        process = Popen([*wrapped, *command], pass_fds=numbers, **options)
        info_end.close()
        with suppress(json.JSONDecodeError, OSError):  # bubblewrap reports the error on stderr
            child = json.loads(info.read())["child-pid"]
            for kind in ("uid_map", "gid_map"):
                Path(f"/proc/{child}/{kind}").write_text(_IDS_OF_ROOT)
        return process  # it starts when the block pipe is closed


@functools.cache
def call_filter() -> bytes:
    """Build the seccomp filter of programs under test, in the kernel's format, with libseccomp.

    It refuses calls outside the reach of namespaces and limits. These are new processes, whose
    memory is not added up, and more tables of descriptors, which may hold sockets full of data. So
    are memory and keys outside of files, sockets without network namespace, and kernel interfaces
    that programs do not need. Threads, files and pipes are allowed.

    Raises:
        SandboxError: libseccomp is missing or cannot build a rule.
    """
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise SandboxError(str(error)) from error
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(_ALLOW))

    def refuse(call: str, error: int, *only_if: int) -> None:
        """Add a rule; `only_if` is struct scmp_arg_cmp: argument, comparison and two numbers."""
        number = library.seccomp_syscall_resolve_name(call.encode())
        rule = (_ERRNO | error, number, bool(only_if), struct.pack("@IiQQ", *only_if or [0] * 4))
        if number == _NO_SUCH_CALL or library.seccomp_rule_add_array(context, *rule):
            raise SandboxError(f"{_LIBRARY} cannot build a rule for {call}")

    for call in REFUSED:
        refuse(call, errno.EPERM)
    for needed in (_CLONE_THREAD, _CLONE_FILES):
        refuse("clone", errno.EPERM, 0, _MASKED_EQUAL, needed, 0)
    refuse("close_range", errno.EPERM, 2, _MASKED_EQUAL, *[_CLOSE_RANGE_UNSHARE] * 2)
    refuse("clone3", errno.ENOSYS)  # flags are not visible to seccomp; libc falls back to clone
    refuse("prlimit64", errno.EPERM, 0, _NOT_EQUAL, 0, 0)  # of another process
    with os.fdopen(os.memfd_create("filter"), "rb") as file:
        if library.seccomp_export_bpf(context, file.fileno()):
            raise SandboxError(f"{_LIBRARY} cannot export the filter")
        library.seccomp_release(context)
        file.seek(0)
        return file.read()
