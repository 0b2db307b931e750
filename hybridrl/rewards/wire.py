"""How a pool and its processes talk, over a socket that the user's code could write to, too.

Down go pickles, up comes JSON: nothing that a process writes is run, or read as more than plain
values, and whatever else it writes is noticed.
"""

import fcntl
import io
import json
import os
import pickle
import resource
import socket
from collections.abc import Iterator
from multiprocessing.connection import wait
from typing import Any

from hybridrl.rewards.messages import Answer, Chunk, FailureKind, Ready, Setup

MAX_MESSAGE_BYTES = 256 * 2**20
_LENGTH_BYTES = 8
_READ_BYTES = 2**16
# Descriptors are numbered from below; where programs close or use them by number, they are low.
_HIGH_DESCRIPTOR = 2**15


class GarbledError(ValueError):
    """What has come is no message."""


class ParentEnd:
    """The pool's end of the way to a process. Nothing here waits for the process without limit.

    Args:
        end: of a pair of sockets.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._socket.setblocking(False)
        self._received = bytearray()

    def fileno(self) -> int:
        """The descriptor to wait on: readable when messages have come or the process has ended."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close it. A second call does nothing."""
        self._socket.close()

    def send(self, message: Setup | Chunk, timeout_s: float) -> None:
        """Send a message.

        Raises:
            OSError: the process has ended, says something unasked, or does not listen in time.
        """
        if wait([self._socket], 0):
            raise ConnectionError("the process has ended or speaks unasked")
        content = pickle.dumps(message)
        self._socket.settimeout(timeout_s)
        self._socket.sendall(content)
        self._socket.setblocking(False)

    def receive(self) -> Iterator[Ready | Answer]:
        """The messages that have come.

        Raises:
            EOFError, OSError: the process has ended.
            GarbledError: what has come is no message.
        """
        while True:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                raise EOFError
            self._received += data
            yield from self._messages()

    def _messages(self) -> Iterator[Ready | Answer]:
        """The whole messages among the bytes so far."""
        while len(self._received) >= _LENGTH_BYTES:
            length = int.from_bytes(self._received[:_LENGTH_BYTES], "big")
            if length > MAX_MESSAGE_BYTES:
                raise GarbledError(f"a message of {length} bytes")
            end = _LENGTH_BYTES + length
            if len(self._received) < end:
                return
            content = bytes(self._received[_LENGTH_BYTES:end])
            del self._received[:end]
            yield _message(content)


class ChildEnd:
    """The process's end, kept where programs that close or use descriptors by number miss it.

    Args:
        fd: inherited; closed.
    """

    def __init__(self, fd: int) -> None:
        self._process = os.getpid()
        lowest = min(_HIGH_DESCRIPTOR, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest)
        os.close(fd)
        self._file = io.FileIO(moved, "r+")
        self._buffered = io.BufferedReader(self._file)

    def receive(self) -> Setup | Chunk:
        """The next message.

        Raises:
            EOFError: the parent has closed its end.
        """
        message: Setup | Chunk = pickle.load(self._buffered)
        return message

    def send(self, message: Ready | Answer) -> None:
        """Send a message; a copy of the process that user's code has forked ends here instead."""
        if os.getpid() != self._process:
            os._exit(0)
        content = json.dumps(_as_list(message)).encode()
        if len(content) > MAX_MESSAGE_BYTES:
            assert isinstance(message, Answer)
            reason = f"its value takes {len(content)} bytes, more than {MAX_MESSAGE_BYTES}"
            return self.send(Answer(message.index, None, FailureKind.error, reason))
        rest = memoryview(len(content).to_bytes(_LENGTH_BYTES, "big") + content)
        while rest:
            rest = rest[self._file.write(rest) :]
        return None


def visible(text: str) -> str:
    r"""`text` with its lone surrogates written out (\ud800): no file or tokenizer takes them."""
    return text.encode(errors="backslashreplace").decode()


def _as_list(message: Ready | Answer) -> list[Any]:
    if isinstance(message, Ready):
        return [message.problem]
    if message.kind is None:
        return [message.index, message.value]
    return [message.index, message.kind, message.reason, message.traceback]


def _message(content: bytes) -> Ready | Answer:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise GarbledError(str(error)) from error
    match found:
        case [None | str() as problem]:
            return Ready(problem and visible(problem))
        case [int() as index, value]:
            return Answer(index, value)
        case [int() as index, "error" | "timeout" as kind, str() as reason, str() as trace]:
            return Answer(index, None, FailureKind(kind), visible(reason), visible(trace))
    raise GarbledError("JSON, but no message")
