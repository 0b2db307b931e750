"""Position of a process in its work, in shared memory that other processes can read at any time.

    worker                               reader, another process of the same user on the same node
    publish()                            open_position(pid)
    enter("rollout.reshard")
    at("bucket", 17, 24)                 read: rollout.reshard, bucket 17 of 24

A read needs no cooperation: the process may be stopped, hang in native code, or hold its
interpreter's lock. The memory has no name in any folder and ends with the process; a reader that
opened it keeps the last position. Only the thread that entered a phase writes.

On a GPU the position is that of enqueued work, and the device may be behind. Events (`mark`) show
how far; they are queried only on request (`look_at_device`).
"""

import mmap
import os
import struct
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

NAME = "hybridrl_position"
# changes, entered, number, total, marks that the device has passed
_NUMBERS = struct.Struct("<5q")
_PASSED_AT = _NUMBERS.size - 8
# phase, part, position of the device
_TEXT_BYTES, _NUM_TEXTS = 96, 3
_SIZE = _NUMBERS.size + _NUM_TEXTS * _TEXT_BYTES
_NOT_REQUESTED = -1
DONE = "done"


class Position(NamedTuple):
    """Position of a process.

    Attributes:
        phase: the current call, such as "actor.update"; empty before the first call.
        part: part of the phase, such as "bucket" or "verify"; "done" after the phase.
        number: number of the part, counted from 1; 0 if parts are not counted.
        total: the last number; 0 if unknown.
        steps: changes since the phase began; equal on ranks with equal work.
        changes: changes since the process began.
        device: first mark that the device has not passed, if requested; else empty.
        passed: marks of the phase that the device has passed; -1 if not requested.
    """

    phase: str
    part: str
    number: int
    total: int
    steps: int
    changes: int
    device: str = ""
    passed: int = _NOT_REQUESTED

    @property
    def is_idle(self) -> bool:
        """True if the process waits for a call."""
        return self.phase == "" or self.part == DONE

    def within(self) -> str:
        """Return the place in the phase: "in bucket 17 of 24", or "at its beginning"."""
        return _words(self.part, self.number, self.total) if self.part else "at its beginning"


def _words(part: str, number: int, total: int) -> str:
    counted = f" {number}" if number else ""
    return f"in {part}{counted}" + (f" of {total}" if total else "")


class _Writer:
    """Writer of a process's position, into memory of its own until it is published."""

    def __init__(self) -> None:
        self._use(bytearray(_SIZE))

    def _use(self, memory: bytearray | mmap.mmap) -> None:
        self._memory = memory
        self._changes = self._entered = 0
        self._part = ""
        self._thread = threading.get_ident()
        self._marks: list[tuple[str, int, int, Any]] = []
        _NUMBERS.pack_into(memory, 0, 0, 0, 0, 0, _NOT_REQUESTED)

    def publish(self) -> None:
        """Make the position of this process readable for other processes."""
        descriptor = os.memfd_create(NAME)
        os.truncate(descriptor, _SIZE)
        # The descriptor stays open: readers find the memory through it.
        self._use(mmap.mmap(descriptor, _SIZE))

    def enter(self, phase: str) -> None:
        """Begin a phase."""
        self._thread = threading.get_ident()
        self._entered = self._changes + 1
        self._marks = []
        self._text(0, phase)
        self.at("")

    def at(self, part: str, number: int = 0, total: int = 0) -> None:
        """Reach a place in the phase; see `Position`."""
        if threading.get_ident() != self._thread:
            return
        if part != self._part:
            self._part = part
            self._text(1, part)
        self._changes += 1
        numbers = self._changes, self._entered, number, total, _NOT_REQUESTED
        _NUMBERS.pack_into(self._memory, 0, *numbers)

    def leave(self) -> None:
        """End the phase."""
        self.at(DONE)

    def mark(self, part: str, number: int, total: int, event: Any) -> None:
        """Add a torch.cuda.Event that the device passes at the end of a place."""
        if threading.get_ident() == self._thread:
            self._marks.append((part, number, total, event))

    def look_at_device(self) -> None:
        """Publish the position of the device; call from another thread than `at`."""
        marks = list(self._marks)
        ahead = [mark for mark in marks if not mark[3].query()]
        self._text(2, _words(*ahead[0][:3]) if ahead else "")
        struct.pack_into("<q", self._memory, _PASSED_AT, len(marks) - len(ahead))

    def _text(self, index: int, text: str) -> None:
        start = _NUMBERS.size + index * _TEXT_BYTES
        content = text.encode(errors="replace")[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        self._memory[start : start + _TEXT_BYTES] = content


_writer = _Writer()
publish, enter, at, leave = _writer.publish, _writer.enter, _writer.at, _writer.leave
mark, look_at_device = _writer.mark, _writer.look_at_device


class PositionReader:
    """Reader of one process's position, which stays readable after the process has ended."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self) -> Position:
        """Return the current position."""
        content = os.pread(self._descriptor, _SIZE, 0)
        changes, entered, number, total, passed = _NUMBERS.unpack_from(content)
        starts = range(_NUMBERS.size, _SIZE, _TEXT_BYTES)
        phase, part, device = (
            content[start : start + _TEXT_BYTES].rstrip(b"\0").decode(errors="replace")
            for start in starts
        )
        steps = changes - entered
        if passed == _NOT_REQUESTED:
            device = ""
        return Position(phase, part, number, total, steps, changes, device, passed)

    def close(self) -> None:
        """Close the memory."""
        os.close(self._descriptor)


def open_position(pid: int) -> PositionReader | None:
    """Open a process's position; None if it is unpublished, gone or another user's."""
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                if os.readlink(link).startswith(f"/memfd:{NAME}"):
                    return PositionReader(os.open(link, os.O_RDONLY))
    return None
