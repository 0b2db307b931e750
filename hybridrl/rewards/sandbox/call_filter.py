"""Seccomp filter of programs under test, built by libseccomp.

It refuses calls outside the reach of namespaces and limits: new processes (their memory is not
added up), memory and keys outside of files, sockets without network namespace, and kernel
interfaces that programs do not need. Threads, files and pipes are allowed.
"""

import ctypes
import errno
import functools
import os
import struct

from hybridrl.rewards.sandbox.bubblewrap import SandboxError

_LIBRARY = "libseccomp.so.2"
_PROCESSES = ("fork", "vfork", "execve", "execveat", "unshare", "setns")
_SOCKETS = ("socket",)  # mainly vsock; socketpair is allowed
_MEMORY = ("memfd_create", "shmget", "semget", "msgget")
_KEYS = ("add_key", "keyctl", "request_key")
_KERNEL = ("bpf", "io_uring_setup", "perf_event_open", "syslog", "userfaultfd")
REFUSED = (*_PROCESSES, *_SOCKETS, *_MEMORY, *_KEYS, *_KERNEL)

# seccomp.h, linux/sched.h
_ALLOW, _ERRNO, _NO_SUCH_CALL = 0x7FFF0000, 0x00050000, -1
_NOT_EQUAL, _MASKED_EQUAL = 1, 7
_CLONE_THREAD = 0x00010000


@functools.cache
def call_filter() -> bytes:
    """Build the filter for this machine's system calls, in the kernel's format.

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
    refuse("clone", errno.EPERM, 0, _MASKED_EQUAL, _CLONE_THREAD, 0)
    refuse("clone3", errno.ENOSYS)  # flags are not visible to seccomp; libc falls back to clone
    refuse("prlimit64", errno.EPERM, 0, _NOT_EQUAL, 0, 0)  # of another process
    with os.fdopen(os.memfd_create("filter"), "rb") as file:
        if library.seccomp_export_bpf(context, file.fileno()):
            raise SandboxError(f"{_LIBRARY} cannot export the filter")
        library.seccomp_release(context)
        file.seek(0)
        return file.read()
