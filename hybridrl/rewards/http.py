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
import math
import numbers
import os
import random
import re
import time
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from hybridrl.rewards.base import Score, checked_by

if TYPE_CHECKING:
    import httpx

FIRST_WAIT_S = 0.25
_TRIED_AGAIN = (408, 429)
_SHOWN_CHARS = 200


class RemoteScorerError(RuntimeError):
    """Failed request: the server cannot be reached, or its answer is not a score."""


def _problems(key: str, args: dict[str, Any]) -> Iterator[str]:
    """Check the arguments, without a request to the server."""
    yield from _url_problems(f"{key}.args.url", args["url"])
    if not (_is_number(args["timeout_s"]) and args["timeout_s"] > 0):
        yield f"{key}.args.timeout_s = {args['timeout_s']}, expected seconds above 0."
    retries = args["retries"]
    if not (_is_number(retries) and isinstance(retries, int) and retries >= 0):
        yield f"{key}.args.retries = {retries}, expected an integer of at least 0."
    yield from _token_problems(f"{key}.args.token_env", args["token_env"])


def _is_number(value: Any) -> bool:
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_real and math.isfinite(value)


def _url_problems(where: str, url: Any) -> Iterator[str]:
    if not isinstance(url, str) or not _is_url(url):
        yield f"{where} = {url}, expected a URL such as http://127.0.0.1:8000/score."
    elif "@" in urlsplit(url).netloc:
        yield (
            f"{where} = {_shown(url)} has a user name or password, which would be saved with the "
            f"config.\nPut a token into an environment variable and set token_env to its name."
        )


def _is_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        has_host = parts.hostname is not None and (parts.port is None or parts.port > 0)
    except ValueError:  # the port or an IPv6 address is none
        return False
    return parts.scheme in ("http", "https") and has_host and not re.search(r"\s", url)


def _token_problems(where: str, name: Any) -> Iterator[str]:
    """Check the token's variable; messages never contain its value."""
    if name is None:
        return
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
        prompt: sent.
        response: sent.
        example: sent.
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
        answer, failure = _post(url, body, timeout_s, token)
        if answer is not None:
            return _score_of(answer, url, token)
        if attempt < retries:
            time.sleep(wait_s(body, attempt))
    raise RemoteScorerError(f"{_shown(url)}: {failure}; {_times(retries + 1)}")


def wait_s(body: bytes, attempt: int) -> float:
    """Return the seconds between failed attempt number `attempt` (from 0) and the next.

    Exponential backoff, 0.25 * 2**attempt, with jitter in [0.5, 1.5) seeded by the arguments.
    """
    spread = random.Random(zlib.crc32(body) + attempt).uniform(0.5, 1.5)
    return FIRST_WAIT_S * 2**attempt * spread


def _post(
    url: str, body: bytes, timeout_s: float, token: str | None
) -> tuple["httpx.Response | None", str]:
    """Return the server's answer, or None and the reason to retry."""
    import httpx

    headers = {"Content-Type": "application/json"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    try:
        answer = _client(timeout_s).post(url, content=body, headers=headers)
    except httpx.TimeoutException as error:
        return None, f"no answer within {timeout_s:g} s ({type(error).__name__})"
    except httpx.TransportError as error:
        return None, f"{type(error).__name__}: {error}"
    if answer.status_code in _TRIED_AGAIN or answer.status_code >= 500:
        return None, _excerpt(answer, token)
    return answer, ""


def _score_of(answer: "httpx.Response", url: str, token: str | None) -> Score:
    """Parse the score of an answer.

    Raises:
        RemoteScorerError: there is none.
    """
    told = f"{_shown(url)}: {_excerpt(answer, token)}"
    if answer.status_code != 200:
        raise RemoteScorerError(told)
    try:
        found = json.loads(answer.content)
    except ValueError as error:
        raise RemoteScorerError(f"{told}, which is no JSON: {error}") from error
    parts = found.get("parts", {}) if isinstance(found, dict) else None
    if not isinstance(parts, dict) or "score" not in found:
        raise RemoteScorerError(f'{told}, expected {{"score": <number>, "parts": {{...}}}}')
    return Score(found["score"], parts)


def _excerpt(answer: "httpx.Response", token: str | None) -> str:
    """Return status and beginning of an answer for messages, with the token masked."""
    text = answer.text if token is None else answer.text.replace(token, "<token>")
    return f"answered {answer.status_code} {text[:_SHOWN_CHARS]!r}"


def _shown(url: str) -> str:
    """Return a URL for messages, without user, password and query, which may be secret."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _times(attempts: int) -> str:
    return "tried once" if attempts == 1 else f"tried {attempts} times"


@functools.cache  # keeps the connection open
def _client(timeout_s: float) -> "httpx.Client":
    import httpx

    return httpx.Client(timeout=timeout_s)
