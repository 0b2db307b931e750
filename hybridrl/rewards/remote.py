"""Requests of remote rewards (http.py, judge.py): JSON by POST, with retries.

A request is tried again after a timeout, a failed connection, and the statuses 408, 429 and 5xx.
Any other status fails at once. Redirects are not followed. Messages never contain the token.
"""

import asyncio
import functools
import json
import os
import random
import re
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx

from hybridrl.rewards.base import SECONDS, at_least, value_problems

FIRST_WAIT_S = 0.25
# Retry-After headers beyond it count as so many seconds.
MAX_ASKED_WAIT_S = 60.0
_TRIED_AGAIN = (408, 429)
_SHOWN_CHARS = 200


class RemoteScorerError(RuntimeError):
    """Failed request: the server cannot be reached, or its answer is not a score."""


class _TryAgain(Exception):
    """Attempt that failed for a reason that may pass; after at least `wait_s`."""

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class Server(NamedTuple):
    """Server of a reward.

    Attributes:
        url: of the POST requests.
        timeout_s: seconds without data after which an attempt fails.
        retries: attempts after the first, separated by `wait_s` or as the server asks.
        token_env: environment variable with a bearer token; None: no token.
    """

    url: str
    timeout_s: float
    retries: int
    token_env: str | None


def server_problems(
    where: str, args: dict[str, Any], url_key: str, token_key: str
) -> Iterator[str]:
    """Check the arguments of a Server, without a request to it."""
    yield from _url_problems(f"{where}.{url_key}", args[url_key])
    rules = {"timeout_s": SECONDS, "retries": at_least(0)}
    yield from value_problems(where, args, rules)
    if args[token_key] is not None:
        yield from _token_problems(f"{where}.{token_key}", args[token_key])


def _url_problems(where: str, url: Any) -> Iterator[str]:
    try:
        parts = httpx.URL(url)
    except (httpx.InvalidURL, TypeError):
        parts = httpx.URL()
    if parts.scheme not in ("http", "https") or not parts.host or re.search(r"\s", url):
        yield f"{where} = {url}, expected a URL such as http://127.0.0.1:8000/score."
    elif parts.userinfo:
        yield (
            f"{where} = {shown(url)} has a user name or password, which would be saved with the "
            f"config.\nPut a token into an environment variable and set "
            f"{'token_env' if where.endswith('.url') else 'api_key_env'} to its name."
        )


def _token_problems(where: str, name: Any) -> Iterator[str]:
    """Check the token's variable; messages never contain its value."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        # The value may be the token itself, so it is not shown.
        yield f"{where} is no name of an environment variable, expected one such as SCORER_TOKEN."
    elif name not in os.environ:
        yield f"{where} = {name}, but there is no such environment variable. export {name}=<token>"
    elif not re.fullmatch(r"[!-~]+", os.environ[name]):
        yield f"{where} = {name}: the variable is empty or has characters other than visible ASCII."


async def post(server: Server, content: dict[str, Any]) -> tuple[Any, str]:
    """Send `content` as JSON and return the JSON of the answer, and an excerpt for messages.

    Values that JSON lacks are sent as text.

    Raises:
        RemoteScorerError: no attempt succeeded, or the answer is no JSON.
    """
    body = json.dumps(content, default=str).encode()
    pause_s, reason = 0.0, ""
    for attempt in range(server.retries + 1):
        if attempt:
            await asyncio.sleep(max(pause_s, wait_s(body, attempt - 1)))
        try:
            return await _ask(server, body)
        except _TryAgain as failure:
            pause_s = failure.wait_s
            reason = f"{shown(server.url)}: {failure}; tried {attempt + 1} times"
    raise RemoteScorerError(reason)


def wait_s(body: bytes, attempt: int) -> float:
    """Return the seconds between failed attempt number `attempt` (from 0) and the next.

    Exponential backoff, 0.25 * 2**attempt, with jitter in [0.5, 1.5) seeded by the arguments.
    """
    spread = random.Random(zlib.crc32(body) + attempt).uniform(0.5, 1.5)
    return FIRST_WAIT_S * 2**attempt * spread


async def _ask(server: Server, body: bytes) -> tuple[Any, str]:
    """Make one attempt; raise RemoteScorerError or, if the answer may yet come, _TryAgain."""
    timeout_s, token = server.timeout_s, None
    headers = {"Content-Type": "application/json"}
    if server.token_env is not None:
        token = os.environ[server.token_env]
        headers["Authorization"] = f"Bearer {token}"
    try:
        client = _client(asyncio.get_running_loop(), timeout_s)
        answer = await client.post(server.url, content=body, headers=headers)
    except httpx.TimeoutException as error:
        raise _TryAgain(f"no answer within {timeout_s:g} s ({type(error).__name__})") from None
    except (httpx.TransportError, httpx.DecodingError) as error:
        raise _TryAgain(f"{type(error).__name__}: {error}") from None
    text = answer.text if token is None else answer.text.replace(token, "<token>")
    excerpt = f"answered {answer.status_code} {text[:_SHOWN_CHARS]!r}"
    if answer.status_code in _TRIED_AGAIN or answer.status_code >= 500:
        asked = answer.headers.get("Retry-After", "")
        raise _TryAgain(excerpt, min(float(asked), MAX_ASKED_WAIT_S) if asked.isdecimal() else 0.0)
    description = f"{shown(server.url)}: {excerpt}"
    if answer.status_code != 200:
        raise RemoteScorerError(description)
    try:
        return answer.json(), description
    except ValueError as error:
        raise RemoteScorerError(f"{description}, which is no JSON: {error}") from error


def shown(url: str) -> str:
    """Return a URL for messages, without user, password and query, which may be secret."""
    return str(httpx.URL(url).copy_with(userinfo=b"", query=None))


@functools.cache  # keeps connections open
def _client(loop: asyncio.AbstractEventLoop, timeout_s: float) -> httpx.AsyncClient:
    """Return the client of an event loop, outside which its connections cannot be used."""
    return httpx.AsyncClient(timeout=timeout_s, limits=httpx.Limits(max_connections=None))
