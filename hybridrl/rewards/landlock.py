"""Landlock: which files this process, and what it starts, may still read; for good.

Sources: https://docs.kernel.org/userspace-api/landlock.html, linux/landlock.h
"""

import ctypes
import os
import struct
from collections.abc import Iterable
from contextlib import suppress

from hybridrl.rewards.kernel import check

# x86_64 and all others alike.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_GIVE_VERSION, _PATH_BENEATH = 1, 1
_EXECUTE, _READ_FILE, _READ_DIR, _REFER = 1 << 0, 1 << 2, 1 << 3, 1 << 13
_OF_FILES = _EXECUTE | _READ_FILE
_READING = _OF_FILES | _READ_DIR
# Moving files between folders is refused unless it is asked for, which older kernels cannot be.
_REFER_VERSION = 2

_libc = ctypes.CDLL(None, use_errno=True)


def landlock_version() -> int:
    """Of the kernel; 0 where it has no Landlock."""
    return max(0, int(_libc.syscall(_CREATE_RULESET, None, 0, _GIVE_VERSION)))


def read_only_these(readable: Iterable[str], own: str | None) -> None:
    """Let files be opened for reading only below some paths; no_new_privs must be set.

    What is open already stays readable. /proc is out of reach unless it is named.

    Args:
        readable: folders and files; those that are not there are left out.
        own: folder in which files may be moved between folders, too; None: there is none.

    Raises:
        OSError: the kernel has no Landlock.
    """
    moving = _REFER if landlock_version() >= _REFER_VERSION else 0
    attributes = struct.pack("=Q", _READING | moving)
    rules = _libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0)
    if rules < 0:
        check("landlock (Linux 5.13)", rules)
    for path in readable:
        with suppress(FileNotFoundError):
            _allow(rules, path, _READING)
    if own is not None:
        _allow(rules, own, _READING | moving)
    check("landlock_restrict_self", _libc.syscall(_RESTRICT_SELF, rules, 0))
    os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
    if not os.path.isdir(path):
        rights &= _OF_FILES
    rule = struct.pack("=Qi", rights, folder)
    check(f"landlock_add_rule {path}", _libc.syscall(_ADD_RULE, rules, _PATH_BENEATH, rule, 0))
    os.close(folder)
