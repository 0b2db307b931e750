"""Connections of the endpoint. Who has sent no request can hold up neither it nor its clients.

A connection waits until the headers of a request are complete. Few may wait, each for some seconds.
A request without a valid key ends its connection (server.py), so that further ones need a key. How
many connections clients with a key hold is not limited.
"""

import asyncio
import resource
from functools import partial
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# Seconds in which the headers of a request must arrive: more than the event loop is ever busy.
HEADERS_S = 30.0
# Connections that wait for headers; beyond, the one that has waited longest is closed. As many as
# uvicorn accepts at once, twice: their headers are read right after.
MAX_WAITING = 4096


class Connection(HttpToolsProtocol):
    """Connection that is closed if it waits for headers too long, or too many do.

    Args:
        waiting: connections that wait and their time limits, the first since longest.
        most: that may wait.
    """

    def __init__(
        self,
        waiting: "dict[Connection, asyncio.TimerHandle]",
        most: int,
        *arguments: Any,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._waiting, self._most = waiting, most

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._begin_to_wait()

    def on_message_begin(self) -> None:
        """Begin to wait for the headers of a further request."""
        super().on_message_begin()
        self._begin_to_wait()

    def on_headers_complete(self) -> None:
        """Begin to answer the request."""
        self._end_to_wait()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._end_to_wait()
        super().connection_lost(exc)

    def _begin_to_wait(self) -> None:
        if self not in self._waiting:
            self._waiting[self] = self.loop.call_later(HEADERS_S, self.transport.abort)
        if len(self._waiting) > self._most:
            oldest = next(iter(self._waiting))
            oldest._end_to_wait()
            oldest.transport.abort()

    def _end_to_wait(self) -> None:
        if (limit := self._waiting.pop(self, None)) is not None:
            limit.cancel()


def connection_class() -> type[asyncio.Protocol]:
    """Return the class of a server's connections, of which at most MAX_WAITING wait together."""
    # Other open files of this process need room, too.
    most = min(MAX_WAITING, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
    return cast("type[asyncio.Protocol]", partial(Connection, {}, most))
