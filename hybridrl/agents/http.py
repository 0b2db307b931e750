"""An HTTP server in a thread with an event loop of its own, and what its handlers share."""

import asyncio
import logging
import socket
import threading
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect

from hybridrl.agents.connections import connection_class
from hybridrl.agents.episode import RequestError

log = logging.getLogger(__name__)
# Places where a server has failed, which were logged.
_logged: set[tuple[str, int | None]] = set()
# Header of an answer to a request without a valid key.
CLOSE = {"Connection": "close"}
GONE = "The client has closed the connection."

# Largest body of a request.
MAX_BODY_BYTES = 16 * 2**20
END_TIMEOUT_S = 5.0
# Seconds until the server closes an idle connection: clients must do so first (httpx after 5), else
# a request may meet a connection that is being closed, and fail.
KEEP_ALIVE_S = 600

Handler = Callable[[Request], Awaitable[Response]]


def request_error(error: Exception) -> RequestError:
    """Return what to answer; an error of the server itself is logged, once for each place."""
    if isinstance(error, RequestError):
        return error
    frame = traceback.extract_tb(error.__traceback__)[-1]
    if (place := (frame.filename, frame.lineno)) not in _logged:
        _logged.add(place)
        log.error("the server failed at a request", exc_info=error)
    return RequestError(f"The server failed: {type(error).__name__}: {error}", 500)


async def body_of(request: Request) -> bytes:
    """Return the body.

    Raises:
        RequestError: it is too large, or the client has gone.
    """
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                raise RequestError(f"The body has more than {MAX_BODY_BYTES} bytes.", 413)
    except ClientDisconnect as error:
        raise RequestError(GONE, 499) from error
    return bytes(body)


def key_of(request: Request) -> str:
    """Return the key of a request: OpenAI's header or Anthropic's."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return request.headers.get("x-api-key", key if scheme.lower() == "bearer" else "")


class HttpServer:
    """A web application on a port, until `close`.

    Attributes:
        url: http://127.0.0.1:<port>.

    Raises:
        OSError: the port is not free.
    """

    def __init__(self, app: FastAPI, host: str, port: int) -> None:
        self._socket = socket.create_server((host, port), backlog=2048)
        self.url = f"http://{host}:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            timeout_graceful_shutdown=1,
            timeout_keep_alive=KEEP_ALIVE_S,
            http=connection_class(),
            ws="none",
        )
        self._server = uvicorn.Server(config)
        self._loop: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(target=self._run, args=(config,), daemon=True)
        self._thread.start()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Event loop in which requests are answered."""
        return self._loop.result()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in the thread of the event loop; return its result."""

        async def called() -> Any:
            return function(*args)

        return asyncio.run_coroutine_threadsafe(called(), self.loop).result()

    def close(self) -> None:
        """End the server and its connections."""
        self._server.should_exit = True
        self._thread.join(END_TIMEOUT_S)
        self._socket.close()

    def _run(self, config: uvicorn.Config) -> None:
        async def serve() -> None:
            self._loop.set_result(asyncio.get_running_loop())
            await self._server.serve(sockets=[self._socket])

        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(serve())
