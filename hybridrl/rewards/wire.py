"""Connection between a pool and a process, over a socket that user code can write to as well.

The pool sends pickles; the process sends JSON, which is never executed. Anything else that the
process sends is detected as an error.
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

from hybridrl.rewards.messages import Chunk, FailureKind, ItemResult, Ready, Setup

MAX_MESSAGE_BYTES = 256 * 2**20
_LENGTH_BYTES = 8
_READ_BYTES = 2**16
# User code that closes or writes descriptors by number uses low numbers.
_HIGH_DESCRIPTOR = 2**15


class ProtocolError(ValueError):
    """Invalid message."""


class ParentEnd:
    """Pool's end of the connection. No method blocks without a time limit.

    Args:
        end: one of a pair of sockets.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._socket.setblocking(False)
        self._received = bytearray()

    def fileno(self) -> int:
        """Return the descriptor: readable when messages have arrived or the process has ended."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the connection. A second call does nothing."""
        self._socket.close()

    def send(self, message: Setup | Chunk, timeout_s: float) -> None:
        """Send a message.

        Raises:
            OSError: the process has ended, sent unexpected data, or does not read in time.
        """
        if wait([self._socket], 0):
            raise ConnectionError("the process has ended or sent unexpected data")
        content = pickle.dumps(message)
        self._socket.settimeout(timeout_s)
        self._socket.sendall(content)
        self._socket.setblocking(False)

    def receive(self) -> Iterator[Ready | ItemResult]:
        """Yield the messages that have arrived.

        Raises:
            EOFError, OSError: the process has ended.
            ProtocolError: a message is invalid.
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

    def _messages(self) -> Iterator[Ready | ItemResult]:
        """Yield the complete messages among the bytes received."""
        while len(self._received) >= _LENGTH_BYTES:
            length = int.from_bytes(self._received[:_LENGTH_BYTES], "big")
            if length > MAX_MESSAGE_BYTES:
                raise ProtocolError(f"a message of {length} bytes")
            end = _LENGTH_BYTES + length
            if len(self._received) < end:
                return
            content = bytes(self._received[_LENGTH_BYTES:end])
            del self._received[:end]
            yield _message(content)


class ChildEnd:
    """Process's end of the connection, moved to a high descriptor out of the way of user code.

    Args:
        fd: inherited; closed here.
    """

    def __init__(self, fd: int) -> None:
        self._process = os.getpid()
        lowest = min(_HIGH_DESCRIPTOR, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest)
        os.close(fd)
        self._file = io.FileIO(moved, "r+")
        self._buffered = io.BufferedReader(self._file)

    def receive(self) -> Setup | Chunk:
        """Return the next message.

        Raises:
            EOFError: the parent has closed its end.
        """
        message: Setup | Chunk = pickle.load(self._buffered)
        return message

    def send(self, message: Ready | ItemResult) -> None:
        """Send a message; end the process if it is a fork made by user code."""
        if os.getpid() != self._process:
            os._exit(0)
        content = json.dumps(_as_list(message)).encode()
        if len(content) > MAX_MESSAGE_BYTES:
            assert isinstance(message, ItemResult)
            reason = f"its value takes {len(content)} bytes, more than {MAX_MESSAGE_BYTES}"
            return self.send(ItemResult(message.index, None, FailureKind.error, reason))
        rest = memoryview(len(content).to_bytes(_LENGTH_BYTES, "big") + content)
        while rest:
            rest = rest[self._file.write(rest) :]
        return None


def visible(text: str) -> str:
    r"""Escape lone surrogates (\ud800), which files and tokenizers cannot encode."""
    return text.encode(errors="backslashreplace").decode()


def _as_list(message: Ready | ItemResult) -> list[Any]:
    if isinstance(message, Ready):
        return [message.problem]
    if message.kind is None:
        return [message.index, message.value]
    return [message.index, message.kind, message.reason, message.traceback]


def _message(content: bytes) -> Ready | ItemResult:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(str(error)) from error
    match found:
        case [None | str() as problem]:
            return Ready(problem and visible(problem))
        case [int() as index, value]:
            return ItemResult(index, value)
        case [int() as index, "error" | "timeout" as kind, str() as reason, str() as trace]:
            return ItemResult(index, None, FailureKind(kind), visible(reason), visible(trace))
    raise ProtocolError("JSON, but no message")
