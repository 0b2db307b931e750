"""Linux calls that Python lacks: a process's end with its parent's, namespaces, mounts, rights.

Everything here changes the calling process, for good.
"""

import ctypes
import os
import signal
import struct
from pathlib import Path

# linux/prctl.h, sched.h, mount.h, capability.h; the last two are numbers of x86_64.
_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 2, 4, 16384, 1 << 18
_AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = -100, 0x8000, 1
_CAPABILITY_VERSION_3 = 0x20080522
_SYS_CAPSET, _SYS_MOUNT_SETATTR = 126, 442

_MAX_FILES = 10_000  # in a file system in memory; their names take memory, too

_libc = ctypes.CDLL(None, use_errno=True)


def check(call: str, result: int) -> None:
    """Raise an OSError that names `call` unless its result is 0."""
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")


def prctl(option: int, argument: int, pointer: int = 0) -> None:
    """prctl(2), whose further arguments are 0."""
    numbers = [ctypes.c_ulong(value) for value in (argument, pointer, 0, 0)]
    check(f"prctl({option})", _libc.prctl(option, *numbers))


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies from now on."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent, of this id, dies."""
    die_with_parent()
    if os.getppid() != parent:  # it died before the kernel was asked
        os._exit(1)


def leave_namespaces() -> None:
    """Enter new user, mount, network, IPC and host-name namespaces, and a PID one for children.

    The network has no interface that is up. In the new user namespace this process has all rights
    over the other new ones, and no right over any process outside. It must have one thread.

    Raises:
        OSError: this kernel or container does not let this user.
    """
    uid, gid = os.geteuid(), os.getegid()
    flags = _CLONE_NEWUSER | _CLONE_NEWNS | _CLONE_NEWNET | _CLONE_NEWPID
    check("unshare", _libc.unshare(flags | _CLONE_NEWIPC | _CLONE_NEWUTS))
    Path("/proc/self/setgroups").write_text("deny")  # asked for before gid_map may be written
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    check("mount /", _libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))


def make_files_read_only() -> None:
    """Make every mount of this process's mount namespace read-only."""
    attributes = struct.pack("=QQQQ", _MOUNT_ATTR_RDONLY, 0, 0, 0)
    result = _libc.syscall(
        _SYS_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, attributes, len(attributes)
    )
    check("mount_setattr (Linux 5.12)", result)


def mount_memory(folder: str, megabytes: int) -> None:
    """Lay an empty file system in memory, of so many MiB (at least 1), over `folder`."""
    options = f"size={megabytes}m,nr_inodes={_MAX_FILES},mode=700".encode()
    flags = _MS_NOSUID | _MS_NODEV
    result = _libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", flags, options)
    check(f"mount {folder}", result)


def drop_rights() -> None:
    """Give up all capabilities, and ways to win any."""
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    check("capset", _libc.syscall(_SYS_CAPSET, header, bytes(24)))
