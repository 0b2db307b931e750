"""The endpoint's paths: a request in one of the formats, its answer, its errors."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from hybridrl.agents.chat import Chat
from hybridrl.agents.episode import RequestError
from hybridrl.agents.format import MODEL, Format, event
from hybridrl.agents.http import (
    CLOSE,
    GONE,
    Handler,
    HttpServer,
    body_of,
    key_of,
    request_error,
)
from hybridrl.agents.messages import Messages
from hybridrl.agents.policy import Policy
from hybridrl.agents.responses import Responses
from hybridrl.agents.text_completions import TextCompletions

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
        policy.episode(key_of(request))
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "hybridrl"}
        if "model" in request.path_params:
            return JSONResponse(model)
        return JSONResponse({"object": "list", "data": [model]})

    async def transcript(request: Request) -> Response:
        return JSONResponse(policy.episode(key_of(request)).transcript())

    for path, handle in (
        ("/v1/transcript", transcript),
        ("/v1/models", models),
        ("/v1/models/{model}", models),
    ):
        app.add_route(path, _with_errors(Chat(), handle))
    return app


def _handler(policy: Policy, form: Format) -> Handler:
    async def handle(request: Request) -> Response:
        policy.episode(key := key_of(request))  # else its body is not read
        asked = form.parse(await body_of(request))
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
            fault = request_error(error)
        return JSONResponse(form.error(fault), fault.status, CLOSE if fault.status == 401 else None)

    return answer


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
        policy.episode(key_of(request))
    except RequestError:
        headers = CLOSE
    return JSONResponse({"type": "error"} | Chat().error(fault), fault.status, headers)


async def _until_the_end(form: Format, events: AsyncIterator[str]) -> AsyncIterator[str]:
    """Yield events, and an error as the last; the stream breaks off if the episode ends."""
    try:
        async for one in events:
            yield one
    except Exception as error:
        if (fault := request_error(error)).status != 401:
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


class EndpointServer(HttpServer):
    """The endpoint on a port, until `close`.

    Attributes:
        url: base URL of OpenAI's clients, http://127.0.0.1:<port>/v1.

    Raises:
        OSError: the port is not free.
    """

    def __init__(self, policy: Policy, host: str, port: int) -> None:
        super().__init__(app_of(policy), host, port)
        self.url += "/v1"
