"""The web application: paths of tinker's SDK, keys, versions, errors."""

import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from google.protobuf.message import DecodeError, Message
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from tinker import types
from tinker.proto import tinker_public_pb2 as messages

from hybridrl.agents.episode import RequestError
from hybridrl.agents.http import CLOSE, Handler, body_of, key_of, request_error
from hybridrl.service.data import ServiceError
from hybridrl.tinker import SUPPORTED, is_supported
from hybridrl.tinker.futures import Answer, json_answer
from hybridrl.tinker.protocol import Answers

# The SDK sends its version with each request.
VERSION_HEADER = "x-stainless-package-version"
# Requests for samples that a client may have open, each with a connection.
OPEN_SAMPLES = 512
# Answers that are always the same; telemetry is dropped.
FIXED: Mapping[str, Mapping[str, object]] = {
    "healthz": {"status": "ok"},
    "client/config": {"sample_max_concurrent_requests": OPEN_SAMPLES},
    "client/dynamic_config": {},
    "telemetry": {"status": "accepted"},
}
T = TypeVar("T", bound=BaseModel | Message)
Handle = Callable[[Request], Awaitable[Answer]]


def app_of(answers: Answers, key: str) -> FastAPI:
    """Return the web application; clients send `key`."""
    p = answers
    app = FastAPI(openapi_url=None, exception_handlers={404: _no_route, 405: _no_route})

    def add(method: str, path: str, handle: Handle) -> None:
        app.add_route(f"/api/v1/{path}", _guarded(handle, key), methods=[method])

    def post(path: str, kind: type[T], answer: Callable[[T], Awaitable[Answer]]) -> None:
        async def handle(request: Request) -> Answer:
            return await answer(_parsed(kind, await body_of(request)))

        add("POST", path, handle)

    post("create_session", types.CreateSessionRequest, p.create_session)
    post("session_heartbeat", types.SessionHeartbeatRequest, p.heartbeat)
    post("create_model", types.CreateModelRequest, p.create_model)
    post("get_info", types.GetInfoRequest, p.get_info)
    post("forward_backward", messages.ForwardBackwardRequest, p.forward_backward)
    post("optim_step", types.OptimStepRequest, p.optim_step)
    post("save_weights", types.SaveWeightsRequest, p.save_weights)
    post("load_weights", types.LoadWeightsRequest, p.load_weights)
    post("save_weights_for_sampler", types.SaveWeightsForSamplerRequest, p.save_for_sampler)
    post("create_sampling_session", types.CreateSamplingSessionRequest, p.create_sampler)
    post("asample", types.SampleRequest, p.sample)
    post("retrieve_future", types.FutureRetrieveRequest, p.retrieve)
    for path, answer in FIXED.items():
        add("GET" if path == "healthz" else "POST", path, _fixed(json_answer(**answer)))
    add("GET", "get_server_capabilities", lambda _: p.capabilities())
    add("GET", "samplers/{name}", lambda request: p.get_sampler(request.path_params["name"]))
    add("POST", "sessions/{name}/finish", lambda request: p.finish(request.path_params["name"]))
    checkpoint = "training_runs/{model}/checkpoints/{kind}/{name}"
    path_of = "tinker://{model}/{kind}/{name}".format_map
    add("DELETE", checkpoint, lambda request: p.delete_state(path_of(request.path_params)))
    return app


def _fixed(answer: Answer) -> Handle:
    async def handle(request: Request) -> Answer:
        await body_of(request)
        return answer

    return handle


def _parsed(kind: type[T], body: bytes) -> T:
    """Return the body of a request as the SDK's own type reads it; RequestError if it does not."""
    try:
        if issubclass(kind, BaseModel):
            return kind.model_validate_json(body)
        message = kind()
        assert isinstance(message, Message)
        message.ParseFromString(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise RequestError(f"{kind.__name__}: {where}: {first['msg']}") from error
    except DecodeError as error:
        raise RequestError(f"{kind.__name__}: {error}") from error
    return message


def _guarded(handle: Handle, key: str) -> Handler:
    """Check key and version of a request before it is read; answer errors as the SDK expects."""

    async def answer(request: Request) -> Response:
        try:
            if not secrets.compare_digest(key_of(request).encode(), key.encode()):
                raise RequestError("TINKER_API_KEY is not the key that this server printed.", 401)
            version = request.headers.get(VERSION_HEADER)
            if version is not None and not is_supported(version):
                raise RequestError(
                    f"tinker = {version}: expected {SUPPORTED}, the versions that this server "
                    f"knows. Type: pip install '{SUPPORTED}'"
                )
            body, media_type = await handle(request)
            return Response(body, media_type=media_type)
        except ServiceError as error:
            fault = RequestError(str(error))
        except Exception as error:
            fault = request_error(error)
        headers = CLOSE if fault.status == 401 else None
        return JSONResponse({"detail": fault.message}, fault.status, headers)

    return answer


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    url = f"{request.url.scheme}://{request.url.netloc}"
    why = (
        f"{request.method} {request.url.path}: this server trains and samples, and has no such "
        f"path. TINKER_BASE_URL is {url}"
    )
    return JSONResponse({"detail": why}, error.status_code, CLOSE)
