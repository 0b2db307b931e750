"""Where a process is in its work, in memory that others can read whatever state it is in.

    worker                               reader, another process of the same user on the same node
    publish()                            open_position(pid)
    enter("rollout.reshard")
    at("bucket", 17, 24)                 read: rollout.reshard, bucket 17 of 24

Reading takes nothing of the process that is looked at: it may be stopped, hang in native code, or
hold its interpreter's lock. The memory has no name in any folder and goes with the process; a
reader that opened it keeps the last position. Writing costs less than a microsecond and does
nothing where nothing was published. One thread of a process writes.

On a GPU a place is what the process has enqueued, and the device may be behind. How far that is
shows by events (`mark`), at which nobody looks unless the process is asked (`look_at_device`).
"""

import mmap
import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

NAME = "hybridrl_position"
# changes, entered, number, total, marks that the device has passed
_NUMBERS = struct.Struct("<5q")
_PASSED_AT = _NUMBERS.size - 8
# phase, part, where the device is
_TEXT_BYTES, _NUM_TEXTS = 96, 3
_SIZE = _NUMBERS.size + _NUM_TEXTS * _TEXT_BYTES
_NOT_ASKED = -1
DONE = "done"


class Position(NamedTuple):
    """Where a process is.

    Attributes:
        phase: what it was called for, "actor.update"; empty before the first call.
        part: of the phase, "bucket" or "verify"; "done" once the phase is over.
        number: of the part, counted from 1; 0 where parts are not counted.
        total: the last number; 0 where it is not known.
        steps: changes since the phase began. Ranks that do the same have the same.
        changes: since the process began.
        device: where the device is, if the process was asked: the last of `mark` that it has not
            passed; else empty.
        passed: marks of the phase that the device has passed; -1 if the process was not asked.
    """

    phase: str
    part: str
    number: int
    total: int
    steps: int
    changes: int
    device: str = ""
    passed: int = _NOT_ASKED

    @property
    def is_idle(self) -> bool:
        """Whether the process waits for a call."""
        return self.phase == "" or self.part == DONE

    def within(self) -> str:
        """The place in the phase: "in bucket 17 of 24", or "at its beginning"."""
        return _words(self.part, self.number, self.total) if self.part else "at its beginning"


def _words(part: str, number: int, total: int) -> str:
    counted = f" {number}" if number else ""
    return f"in {part}{counted}" + (f" of {total}" if total else "")


class Event(Protocol):
    """What tells whether a device has got somewhere, as torch.cuda.Event does."""

    def query(self) -> bool:
        """Whether the device has passed it."""


class _Writer:
    """Keeps a process's position in shared memory."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._changes = self._entered = 0
        self._part = ""
        self._marks: list[tuple[str, int, int, Event]] = []
        _NUMBERS.pack_into(memory, 0, 0, 0, 0, 0, _NOT_ASKED)

    def enter(self, phase: str) -> None:
        self._entered = self._changes + 1
        self._marks = []
        self._text(0, phase)
        self.at("", 0, 0)

    def at(self, part: str, number: int, total: int) -> None:
        if part != self._part:
            self._part = part
            self._text(1, part)
        self._changes += 1
        numbers = self._changes, self._entered, number, total, _NOT_ASKED
        _NUMBERS.pack_into(self._memory, 0, *numbers)

    def mark(self, part: str, number: int, total: int, event: Event) -> None:
        self._marks.append((part, number, total, event))

    def look_at_device(self) -> None:
        marks = list(self._marks)
        ahead = [mark for mark in marks if not mark[3].query()]
        self._text(2, _words(*ahead[0][:3]) if ahead else "")
        struct.pack_into("<q", self._memory, _PASSED_AT, len(marks) - len(ahead))

    def _text(self, index: int, text: str) -> None:
        start = _NUMBERS.size + index * _TEXT_BYTES
        content = text.encode(errors="replace")[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        self._memory[start : start + _TEXT_BYTES] = content


_writer: _Writer | None = None


def publish() -> None:
    """Let others see the position of this process from now on, for as long as it lives."""
    global _writer
    descriptor = os.memfd_create(NAME)
    os.truncate(descriptor, _SIZE)
    # The descriptor stays open: readers find the memory by it.
    _writer = _Writer(mmap.mmap(descriptor, _SIZE))


def enter(phase: str) -> None:
    """Begin a phase."""
    if _writer is not None:
        _writer.enter(phase)


def at(part: str, number: int = 0, total: int = 0) -> None:
    """Reach a place in the phase; see `Position`."""
    if _writer is not None:
        _writer.at(part, number, total)


def mark(part: str, number: int, total: int, event: Event) -> None:
    """Add an event that the device passes when it is done with a place, and not before."""
    if _writer is not None:
        _writer.mark(part, number, total, event)


def look_at_device() -> None:
    """Publish how far the device is; for another thread than the one that moves."""
    if _writer is not None:
        _writer.look_at_device()


def leave() -> None:
    """End the phase."""
    at(DONE)


class PositionReader:
    """Reads the position of one process; the last one stays readable when the process is gone.

    Args:
        descriptor: of the process's memory; owned by this.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self) -> Position:
        """Where the process is now."""
        content = os.pread(self._descriptor, _SIZE, 0)
        changes, entered, number, total, passed = _NUMBERS.unpack_from(content)
        starts = range(_NUMBERS.size, _SIZE, _TEXT_BYTES)
        phase, part, device = (
            content[start : start + _TEXT_BYTES].rstrip(b"\0").decode(errors="replace")
            for start in starts
        )
        steps = changes - entered
        if passed == _NOT_ASKED:
            device = ""
        return Position(phase, part, number, total, steps, changes, device, passed)

    def close(self) -> None:
        """Let go of the memory."""
        os.close(self._descriptor)


def open_position(pid: int) -> PositionReader | None:
    """A reader of a process's position; None if it publishes none, is gone or another user's."""
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                if os.readlink(link).startswith(f"/memfd:{NAME}"):
                    return PositionReader(os.open(link, os.O_RDONLY))
    return None
