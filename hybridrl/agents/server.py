"""HTTP server of the endpoint: FastAPI and uvicorn in a thread with an event loop of its own."""

import asyncio
import logging
import socket
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from hybridrl.agents.chat import Chat
from hybridrl.agents.connections import connection_class
from hybridrl.agents.episode import RequestError
from hybridrl.agents.format import MODEL, Format, event
from hybridrl.agents.messages import Messages
from hybridrl.agents.policy import Policy
from hybridrl.agents.responses import Responses
from hybridrl.agents.text_completions import TextCompletions

log = logging.getLogger(__name__)
# Places where the endpoint has failed, which were logged.
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
FORMATS: Mapping[str, type[Format]] = {
    "/v1/chat/completions": Chat,
    "/v1/completions": TextCompletions,
    "/v1/responses": Responses,
    "/v1/messages": Messages,
}


def app_of(policy: Policy) -> FastAPI:
    """Return the web application of the endpoint."""
    no_route = partial(_no_route, policy)
    app = FastAPI(openapi_url=None, exception_handlers={404: no_route, 405: no_route})
    for path, form in FORMATS.items():
        app.add_route(path, _with_errors(form(), _handler(policy, form())), methods=["POST"])

    async def models(request: Request) -> Response:
        policy.episode(_key(request))
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "hybridrl"}
        if "model" in request.path_params:
            return JSONResponse(model)
        return JSONResponse({"object": "list", "data": [model]})

    async def transcript(request: Request) -> Response:
        return JSONResponse(policy.episode(_key(request)).transcript())

    for path, handle in (
        ("/v1/transcript", transcript),
        ("/v1/models", models),
        ("/v1/models/{model}", models),
    ):
        app.add_route(path, _with_errors(Chat(), handle))
    return app


def _handler(policy: Policy, form: Format) -> Handler:
    async def handle(request: Request) -> Response:
        policy.episode(key := _key(request))  # else its body is not read
        asked = form.parse(await _body(request))
        episode = policy.episode(key)  # meanwhile another attempt may have begun
        ask = form.ask(policy, episode, asked)
        begun = policy.begin(episode, ask, asked.count, in_pieces=bool(asked.stream))
        if asked.stream:
            pieces = policy.pieces(episode, begun)
            events = _until_the_end(form, form.events(policy, episode, asked, pieces))
            return StreamingResponse(events, media_type="text/event-stream")
        sampled = await _unless_gone(request, policy.complete(episode, begun))
        return JSONResponse(form.answer(policy, episode, asked, sampled))

    return handle


def _with_errors(form: Format, handle: Handler) -> Handler:
    """Answer an error in this format; one that is not a RequestError is logged once."""

    async def answer(request: Request) -> Response:
        try:
            return await handle(request)
        except Exception as error:
            # uvicorn would close the connection, at which a client's next request fails.
            fault = _request_error(error)
        return JSONResponse(form.error(fault), fault.status, CLOSE if fault.status == 401 else None)

    return answer


def _request_error(error: Exception) -> RequestError:
    """Return what to answer; an error of the endpoint itself is logged, once for each place."""
    if isinstance(error, RequestError):
        return error
    frame = traceback.extract_tb(error.__traceback__)[-1]
    if (place := (frame.filename, frame.lineno)) not in _logged:
        _logged.add(place)
        log.error("the endpoint failed at a request", exc_info=error)
    return RequestError(f"The endpoint failed: {type(error).__name__}: {error}", 500)


async def _no_route(policy: Policy, request: Request, error: Exception) -> Response:
    """Answer a request to a path or with a method that the endpoint does not have."""
    assert isinstance(error, HTTPException)
    url = f"{request.url.scheme}://{request.url.netloc}"
    why = (
        f"{request.method} {request.url.path}: {error.detail}. OpenAI's clients take the base URL "
    )
    fault = RequestError(f"{why}{url}/v1, Anthropic's {url}.", error.status_code, code="not_found")
    headers = None
    try:
        policy.episode(_key(request))
    except RequestError:
        headers = CLOSE
    return JSONResponse({"type": "error"} | Chat().error(fault), fault.status, headers)


async def _until_the_end(form: Format, events: AsyncIterator[str]) -> AsyncIterator[str]:
    """Yield events, and an error as the last; the stream breaks off if the episode ends."""
    try:
        async for one in events:
            yield one
    except Exception as error:
        if (fault := _request_error(error)).status != 401:
            yield event(form.error(fault), "error")


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of `work`, which is cancelled if the client closes the connection."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise RequestError(GONE, 499)
        return task.result()
    finally:
        gone.cancel()
        task.cancel()


async def _body(request: Request) -> bytes:
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


def _key(request: Request) -> str:
    """Return the key of a request: OpenAI's header or Anthropic's."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return request.headers.get("x-api-key", key if scheme.lower() == "bearer" else "")


class EndpointServer:
    """The endpoint on a port, until `close`.

    Attributes:
        url: base URL of OpenAI's clients, http://127.0.0.1:<port>/v1.

    Raises:
        OSError: the port is not free.
    """

    def __init__(self, policy: Policy, host: str, port: int) -> None:
        self._socket = socket.create_server((host, port), backlog=2048)
        self.url = f"http://{host}:{self._socket.getsockname()[1]}/v1"
        config = uvicorn.Config(
            app_of(policy),
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
