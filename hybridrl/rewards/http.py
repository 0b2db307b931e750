"""Remote scorer: requests each response's score from an HTTP server.

    POST <url>                      Content-Type: application/json
    {"prompt": "...", "response": "...", "example": {...}}

    200
    {"score": 0.75, "parts": {"style": 0.5}}

The example is the row of the data set; values that JSON lacks are sent as text. "parts" is
optional; each part becomes the metric reward/part_<name>. Requests are retried after a timeout of
timeout_s, a failed connection, and the statuses 408, 429 and 5xx. Any other status or content fails
the response at once. Redirects are not followed.

A reward process has one request at a time and keeps its connection open, so at most
reward.num_processes requests are concurrent. reward.timeout_s must exceed the time of all attempts
and the waits between them.
"""

import functools
import json
import os
import random
import re
import time
import zlib
from collections.abc import Iterator
from typing import Any

import httpx

from hybridrl.rewards.base import SECONDS, Score, at_least, checked_by, value_problems

FIRST_WAIT_S = 0.25
_TRIED_AGAIN = (408, 429)
_SHOWN_CHARS = 200


class RemoteScorerError(RuntimeError):
    """Failed request: the server cannot be reached, or its answer is not a score."""


class _TryAgain(Exception):
    """Attempt that failed for a reason that may pass."""


def _problems(key: str, args: dict[str, Any]) -> Iterator[str]:
    """Check the arguments, without a request to the server."""
    yield from _url_problems(f"{key}.args.url", args["url"])
    rules = {"timeout_s": SECONDS, "retries": at_least(0)}
    yield from value_problems(f"{key}.args", args, rules)
    if args["token_env"] is not None:
        yield from _token_problems(f"{key}.args.token_env", args["token_env"])


def _url_problems(where: str, url: Any) -> Iterator[str]:
    try:
        parts = httpx.URL(url)
    except (httpx.InvalidURL, TypeError):
        parts = httpx.URL()
    if parts.scheme not in ("http", "https") or not parts.host or re.search(r"\s", url):
        yield f"{where} = {url}, expected a URL such as http://127.0.0.1:8000/score."
    elif parts.userinfo:
        yield (
            f"{where} = {_shown(url)} has a user name or password, which would be saved with the "
            f"config.\nPut a token into an environment variable and set token_env to its name."
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


@checked_by(_problems)
def score(
    prompt: str,
    response: str,
    example: dict[str, Any],
    url: str,
    timeout_s: float,
    retries: int,
    token_env: str | None,
) -> Score:
    """Return the score from the server at `url`, by the protocol in the module's docstring.

    Args:
        prompt, response, example: sent.
        url: of the POST request.
        timeout_s: seconds without data after which an attempt fails.
        retries: attempts after the first, separated by `wait_s`.
        token_env: environment variable with a bearer token; None: no token.

    Raises:
        RemoteScorerError: no attempt succeeded, or the answer is not a score.
    """
    content = {"prompt": prompt, "response": response, "example": example}
    body = json.dumps(content, default=str).encode()
    token = os.environ[token_env] if token_env is not None else None
    for attempt in range(retries + 1):
        if attempt:
            time.sleep(wait_s(body, attempt - 1))
        try:
            return _ask(url, body, timeout_s, token)
        except _TryAgain as failure:
            reason = f"{_shown(url)}: {failure}; tried {attempt + 1} times"
    raise RemoteScorerError(reason)


def wait_s(body: bytes, attempt: int) -> float:
    """Return the seconds between failed attempt number `attempt` (from 0) and the next.

    Exponential backoff, 0.25 * 2**attempt, with jitter in [0.5, 1.5) seeded by the arguments.
    """
    spread = random.Random(zlib.crc32(body) + attempt).uniform(0.5, 1.5)
    return FIRST_WAIT_S * 2**attempt * spread


def _ask(url: str, body: bytes, timeout_s: float, token: str | None) -> Score:
    """Return the server's score; raise RemoteScorerError or, if it may yet come, _TryAgain."""
    headers = {"Content-Type": "application/json"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    try:
        answer = _client(timeout_s).post(url, content=body, headers=headers)
    except httpx.TimeoutException as error:
        raise _TryAgain(f"no answer within {timeout_s:g} s ({type(error).__name__})") from None
    except httpx.TransportError as error:
        raise _TryAgain(f"{type(error).__name__}: {error}") from None
    text = answer.text if token is None else answer.text.replace(token, "<token>")
    excerpt = f"answered {answer.status_code} {text[:_SHOWN_CHARS]!r}"
    if answer.status_code in _TRIED_AGAIN or answer.status_code >= 500:
        raise _TryAgain(excerpt)
    told = f"{_shown(url)}: {excerpt}"
    if answer.status_code != 200:
        raise RemoteScorerError(told)
    try:
        found = answer.json()
    except ValueError as error:
        raise RemoteScorerError(f"{told}, which is no JSON: {error}") from error
    match found:
        case {"score": value, "parts": dict() as parts}:
            return Score(value, parts)
        case {"score": value} if "parts" not in found:
            return Score(value, {})
    raise RemoteScorerError(f'{told}, expected {{"score": <number>, "parts": {{...}}}}')


def _shown(url: str) -> str:
    """Return a URL for messages, without user, password and query, which may be secret."""
    return str(httpx.URL(url).copy_with(userinfo=b"", query=None))


@functools.cache  # keeps the connection open
def _client(timeout_s: float) -> httpx.Client:
    return httpx.Client(timeout=timeout_s)
