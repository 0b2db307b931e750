"""The system-call filter as a program: run by an interpreter of its own, numbers by the header."""

import errno
import os
import re
from pathlib import Path

import pytest

from hybridrl.rewards.syscall_filter import REFUSED, WRITING, filter_steps

HEADER = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
X86_64, AARCH64 = 0xC000003E, 0xC00000B7
ALLOW, KILL = "allow", "kill"
EPERM, ENOSYS = errno.EPERM, errno.ENOSYS


def answer(number: int, *arguments: int, may_write: bool = True, architecture: int = X86_64):
    """What the filter says to a call: ALLOW, KILL or an errno."""
    fields = {0: number, 4: architecture}
    fields |= {16 + 8 * i: value & 0xFFFFFFFF for i, value in enumerate([*arguments, 0, 0, 0])}
    held, at = 0, 0
    steps = filter_steps(may_write=may_write)
    while True:
        step = steps[at]
        at += 1
        if step.code == 0x20:  # BPF_LD | BPF_W | BPF_ABS
            held = fields[step.operand]
        elif step.code == 0x06:  # BPF_RET | BPF_K
            action, data = step.operand & 0xFFFF0000, step.operand & 0xFFFF
            return {0x7FFF0000: ALLOW, 0x80000000: KILL}.get(action, data)
        else:  # BPF_JMP | BPF_JEQ, BPF_JGE or BPF_JSET, | BPF_K
            holds = {
                0x15: held == step.operand,
                0x35: held >= step.operand,
                0x45: bool(held & step.operand),
            }[step.code]
            at += step.if_true if holds else step.if_false


@pytest.mark.skipif(not HEADER.exists(), reason=f"there is no {HEADER}")
def test_numbers_are_the_headers():
    found = dict(re.findall(r"#define __NR_(\w+) (\d+)", HEADER.read_text()))
    assert {name: int(found[name]) for name in REFUSED | WRITING} == REFUSED | WRITING


def test_listed_calls_are_refused_and_writing_where_it_is_not_allowed():
    assert {answer(number) for number in REFUSED.values()} == {EPERM}
    assert {answer(number) for number in WRITING.values()} == {ALLOW}
    assert {answer(number, may_write=False) for number in WRITING.values()} == {EPERM}


@pytest.mark.parametrize("number", [0, 1, 9, 11, 12, 13, 53, 60, 202, 231, 317, 449])
def test_others_pass(number):
    """read, write, mmap, munmap, brk, rt_sigaction, socketpair, exit, futex and so on."""
    assert answer(number) == answer(number, may_write=False) == ALLOW


def test_calls_of_other_interfaces_and_newer_ones_do_not_pass():
    assert answer(0, architecture=AARCH64) == KILL
    assert answer(0x40000000 + 41) == EPERM  # socket, by x32's number
    assert answer(450) == answer(467) == ENOSYS
    assert answer(435) == ENOSYS  # clone3


def test_threads_pass_and_processes_do_not():
    thread = 0x3D0F00  # what pthread_create asks for
    assert answer(56, thread) == ALLOW
    assert answer(56, 17) == answer(56, thread & ~0x10000) == EPERM  # SIGCHLD alone: a fork


def test_signals_and_limits_are_for_itself_alone():
    assert answer(234, os.getpid(), 5, 6) == ALLOW
    assert answer(234, os.getpid() + 1, os.getpid()) == EPERM
    assert answer(302, 0, 7) == ALLOW
    assert answer(302, os.getpid() + 1, 7) == EPERM


def test_files_may_be_opened_for_reading_alone():
    reading = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_CREAT, os.O_TRUNC, os.O_TMPFILE | os.O_RDWR):
        for call in ((2, 0, flags), (257, -100, 0, flags)):
            assert answer(*call) == ALLOW
            assert answer(*call, may_write=False) == EPERM
    assert answer(2, 0, reading, may_write=False) == ALLOW
    assert answer(257, -100, 0, reading, may_write=False) == ALLOW
    assert answer(437, may_write=False) == ENOSYS  # openat2: its flags cannot be seen
