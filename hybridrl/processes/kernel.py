"""Linux calls that Python lacks. Each changes the calling process, for good."""

import ctypes
import os
import signal
import struct

# linux/prctl.h, seccomp.h, mount.h, capability.h
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER = 1, 4, 22, 36
_SECCOMP_MODE_FILTER = 2
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8
_CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def _check(call: str, result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")


def _prctl(option: int, argument: int, pointer: int = 0) -> None:
    numbers = [ctypes.c_ulong(value) for value in (argument, pointer, 0, 0)]
    _check(f"prctl({option})", _libc.prctl(option, *numbers))


def adopt_orphans() -> None:
    """Make this process the parent of all orphans below it."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with(parent: int, signum: signal.Signals = signal.SIGKILL) -> None:
    """Make the kernel send this process a signal when its parent, of this id, dies."""
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:  # it died before the kernel was asked
        os._exit(1)


def mount_memory(folder: str, megabytes: int, files: int) -> None:
    """Mount an empty file system in memory, limited to so many MiB and files, on `folder`."""
    options = f"size={megabytes}m,nr_inodes={files},mode=1777".encode()
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    result = _libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", flags, options)
    _check(f"mount {folder}", result)


def become_powerless(user: int) -> None:
    """Give up root for `user` and all capabilities; hide memory from processes of the same user."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    _check("capset", _libc.capset(header, bytes(24)))
    _prctl(_PR_SET_DUMPABLE, 0)


def refuse_calls(filter_code: bytes) -> None:
    """Put this process under a seccomp filter in the kernel's format; it has no_new_privs."""
    code = ctypes.create_string_buffer(filter_code)
    steps = struct.pack("@HP", len(filter_code) // 8, ctypes.addressof(code))
    program = ctypes.create_string_buffer(steps)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(program))
