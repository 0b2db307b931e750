"""Requests whose results are asked for later, and those of a model in their order.

The SDK submits a request, gets its id, and polls for the result. It may send both again if a
connection breaks; an id stands for one request, which is done once.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import NamedTuple, TypeVar

from hybridrl.agents.episode import RequestError
from hybridrl.agents.http import request_error
from hybridrl.service.data import ServiceError

T = TypeVar("T")
JSON, PROTOBUF = "application/json", "application/x-protobuf"
# Seconds that a poll waits for a result; the SDK waits 45 for its answer.
POLL_S = 20.0
# Seconds for which a result stays after it was sent.
KEPT_S = 600.0
# Seconds for which a request waits for an earlier one of its model, such as a chunk of its data.
EARLIER_S = 300.0


class Answer(NamedTuple):
    """Body of a result, and its media type."""

    body: bytes
    media_type: str = JSON


def json_answer(**fields: object) -> Answer:
    """Return a result in JSON."""
    return Answer(json.dumps(fields).encode())


def known(kind: str, table: dict[str, T], name: str) -> T:
    """Return what a client has by its name; RequestError if it is not there any more."""
    if name not in table:
        raise RequestError(
            f"{kind} {name}: there is none. It has ended, or the server was started again. Go on "
            f"from a saved state: create_training_client_from_state_with_optimizer.",
            404,
        )
    return table[name]


class Results:
    """Results by the ids of their requests, for the thread of the event loop.

    Attributes:
        failed: gets the error after which the service does no more calls.
    """

    def __init__(self) -> None:
        self.failed: Future[BaseException] = Future()
        self._tasks: dict[str, asyncio.Task[Answer]] = {}
        self._sent: dict[str, float] = {}  # when, for the first time

    def submit(self, request_id: str, work: Callable[[], Awaitable[Answer]]) -> None:
        """Begin a request, unless it was sent before."""
        if request_id not in self._tasks:
            self._tasks[request_id] = asyncio.create_task(self._answer(work))

    async def poll(self, request_id: str) -> Answer:
        """Return the result of a request; RequestError if it takes longer, or there is none."""
        task = known("request", self._tasks, request_id)
        done, _ = await asyncio.wait([task], timeout=POLL_S)
        if not done:
            raise RequestError("It takes longer: ask again.", 408)
        now = time.monotonic()
        for old in [one for one, at in self._sent.items() if now - at > KEPT_S]:
            del self._sent[old]
            self._tasks.pop(old, None)
        self._sent.setdefault(request_id, now)
        return task.result()

    def drop(self, session: str) -> None:
        """Cancel and forget the requests of a session."""
        for request_id in [one for one in self._tasks if one.startswith(f"{session}:")]:
            self._tasks.pop(request_id).cancel()

    def watched(self, call: "Future[T]") -> "Future[T]":
        """Return a call of the service, whose failure will be noted."""

        def note(call: "Future[T]") -> None:
            error = None if call.cancelled() else call.exception()
            if error is not None and not isinstance(error, ServiceError):
                with suppress(InvalidStateError):  # one has failed before
                    self.failed.set_result(error)

        call.add_done_callback(note)
        return call

    async def done(self, call: "Future[T]") -> T:
        """Return the result of a call of the service."""
        return await asyncio.wrap_future(self.watched(call))

    async def _answer(self, work: Callable[[], Awaitable[Answer]]) -> Answer:
        try:
            return await work()
        except ServiceError as error:
            return json_answer(error=str(error), category="user")
        except Exception as error:
            return json_answer(error=request_error(error).message, category="server")


class Turns:
    """Order of a model's requests: of their numbers, from 1 on, not of their arrival."""

    def __init__(self) -> None:
        self._next = 1
        self._waiting: dict[int, asyncio.Event] = {}

    async def begin(self, number: int, call: Callable[[], T]) -> T:
        """Return what `call` returns in its turn, which is over whatever it raises."""
        if number > self._next:
            event = self._waiting.setdefault(number, asyncio.Event())
            try:
                await asyncio.wait_for(event.wait(), EARLIER_S)
            except TimeoutError:
                raise ServiceError(
                    f"request {self._next} of this model has not arrived in {EARLIER_S:.0f} s, and "
                    f"request {number} waits for it.\nGo on from a saved state with a new client"
                ) from None
        try:
            return call()
        finally:
            self._next = max(self._next, number + 1)
            if (following := self._waiting.pop(self._next, None)) is not None:
                following.set()
