"""A seccomp filter: which system calls a program under test may not make.

What is refused fails as if the user had no right to it: new processes and programs, sockets,
signals and memory of other processes, new namespaces and mounts, memory that no limit counts.
Threads, ordinary files and pipes are let pass; writing to files can be refused, too.
"""

import ctypes
import errno
import os
import platform
import struct
from typing import NamedTuple

from hybridrl.rewards.kernel import prctl

ARCHITECTURE = "x86_64"  # the numbers below are its
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_AUDIT_ARCH_X86_64 = 0xC000003E
_X32_CALLS = 0x40000000
# Calls that are newer than this list do not exist for the program.
_FIRST_UNKNOWN = 450

# Refused always; asm/unistd_64.h.
REFUSED = {
    "socket": 41,
    "fork": 57,
    "vfork": 58,
    "execve": 59,
    "execveat": 322,
    "kill": 62,
    "tkill": 200,
    "rt_sigqueueinfo": 129,
    "rt_tgsigqueueinfo": 297,
    "pidfd_send_signal": 424,
    "pidfd_open": 434,
    "pidfd_getfd": 438,
    "ptrace": 101,
    "process_vm_readv": 310,
    "process_vm_writev": 311,
    "process_madvise": 440,
    "kcmp": 312,
    "move_pages": 279,
    "migrate_pages": 256,
    "setsid": 112,
    "setpgid": 109,
    "setpriority": 141,
    "ioprio_set": 251,
    "sched_setparam": 142,
    "sched_setscheduler": 144,
    "sched_setaffinity": 203,
    "sched_setattr": 314,
    "prctl": 157,
    "personality": 135,
    "unshare": 272,
    "setns": 308,
    "mount": 165,
    "umount2": 166,
    "pivot_root": 155,
    "chroot": 161,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "mount_setattr": 442,
    "open_by_handle_at": 304,
    "bpf": 321,
    "perf_event_open": 298,
    "userfaultfd": 323,
    "add_key": 248,
    "request_key": 249,
    "keyctl": 250,
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "shmget": 29,
    "semget": 64,
    "msgget": 68,
    "mq_open": 240,
    "memfd_create": 319,
    "memfd_secret": 447,
}
# Refused where files may not be written: what changes names, contents or rights by path.
WRITING = {
    "creat": 85,
    "truncate": 76,
    "unlink": 87,
    "unlinkat": 263,
    "rename": 82,
    "renameat": 264,
    "renameat2": 316,
    "rmdir": 84,
    "mkdir": 83,
    "mkdirat": 258,
    "mknod": 133,
    "mknodat": 259,
    "link": 86,
    "linkat": 265,
    "symlink": 88,
    "symlinkat": 266,
    "chmod": 90,
    "fchmod": 91,
    "fchmodat": 268,
    "chown": 92,
    "fchown": 93,
    "lchown": 94,
    "fchownat": 260,
    "utime": 132,
    "utimes": 235,
    "futimesat": 261,
    "utimensat": 280,
    "setxattr": 188,
    "lsetxattr": 189,
    "fsetxattr": 190,
    "removexattr": 197,
    "lremovexattr": 198,
    "fremovexattr": 199,
}
_CLONE, _CLONE3, _TGKILL, _PRLIMIT64, _OPEN, _OPENAT, _OPENAT2 = 56, 435, 234, 302, 2, 257, 437
_CLONE_THREAD = 0x00010000

# linux/bpf_common.h and linux/seccomp.h
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000


class Step(NamedTuple):
    """One instruction: what it does, steps to jump over if it holds and if not, its operand."""

    code: int
    if_true: int
    if_false: int
    operand: int


def filter_steps(*, may_write: bool) -> list[Step]:
    """The filter's program for the calling process.

    Args:
        may_write: whether files may be opened for writing, made, renamed and removed.
    """
    refused = [*REFUSED.values(), *(() if may_write else WRITING.values())]
    steps = [
        _load(_ARCHITECTURE_AT),
        Step(_EQUAL, 1, 0, _AUDIT_ARCH_X86_64),
        _answer(_KILL),
        _load(_NUMBER_AT),
        *_if(_AT_LEAST, _X32_CALLS, errno.EPERM),
        *_if(_AT_LEAST, _FIRST_UNKNOWN, errno.ENOSYS),
        *_if(_EQUAL, _CLONE3, errno.ENOSYS),  # the C library falls back on clone
    ]
    for number in refused:
        steps += _if(_EQUAL, number, errno.EPERM)
    steps += _only_with(_CLONE, 0, Step(_ANY_BIT, 0, 1, _CLONE_THREAD))
    steps += _only_with(_TGKILL, 0, Step(_EQUAL, 0, 1, os.getpid()))  # as abort() does
    steps += _only_with(_PRLIMIT64, 0, Step(_EQUAL, 0, 1, 0))
    if not may_write:
        writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
        steps += _if(_EQUAL, _OPENAT2, errno.ENOSYS)
        steps += _only_with(_OPEN, 1, Step(_ANY_BIT, 1, 0, writing))
        steps += _only_with(_OPENAT, 2, Step(_ANY_BIT, 1, 0, writing))
    return [*steps, _answer(_ALLOW)]


def install_filter(*, may_write: bool) -> None:
    """Put this process, and what it may start, under the filter; no_new_privs must be set.

    Raises:
        OSError: the kernel has no such filters, or another architecture.
    """
    if platform.machine() != ARCHITECTURE:
        raise OSError(errno.ENOSYS, f"the filter is written for {ARCHITECTURE} alone")
    steps = filter_steps(may_write=may_write)
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(steps), ctypes.addressof(code)))
    prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(program))


def _load(offset: int) -> Step:
    return Step(_LOAD, 0, 0, offset)


def _answer(action: int) -> Step:
    return Step(_RETURN, 0, 0, action)


def _if(comparison: int, operand: int, error: int) -> list[Step]:
    """Fail the call with `error` if its number compares so."""
    return [Step(comparison, 0, 1, operand), _answer(_ERRNO | error)]


def _only_with(number: int, argument: int, holds: Step) -> list[Step]:
    """For the call `number`: allow it if `holds`, a jump over 0 steps, is met; else EPERM."""
    return [
        Step(_EQUAL, 0, 4, number),
        _load(_ARGUMENTS_AT + 8 * argument),  # the lower half: little-endian
        holds,
        _answer(_ALLOW),
        _answer(_ERRNO | errno.EPERM),
    ]
