"""A remote scorer: asks an HTTP server for each response's score.

    POST <url>                      Content-Type: application/json
    {"prompt": "...", "response": "...", "example": {...}}

    200                             the example is the row of the data set, what is no JSON as text
    {"score": 0.75, "parts": {"style": 0.5}}

"parts" may be left out; each becomes the metric reward/part_<name>. Silence for timeout_s, a
connection that fails, and the statuses 408, 429 and 5xx are tried again; any other status, and an
answer that is not as above, fail the response at once. Redirects are not followed.

A reward process waits for one answer at a time, so that reward.num_processes is the largest number
of requests under way; each process keeps its connection open. reward.timeout_s must leave room for
all attempts and the waits between them, or it cuts the retries off.
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
    """The server gave no score: it could not be reached, or its answer is none."""


def _problems(key: str, args: dict[str, Any]) -> Iterator[str]:
    """Whether the arguments are usable; the server itself is not asked."""
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
            f"{where} = {_shown(url)} holds a user name or password, which would be kept with the "
            f"config.\nPut a token into an environment variable and name that as token_env."
        )


def _is_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        has_host = parts.hostname is not None and (parts.port is None or parts.port > 0)
    except ValueError:  # the port or an IPv6 address is none
        return False
    return parts.scheme in ("http", "https") and has_host and not re.search(r"\s", url)


def _token_problems(where: str, name: Any) -> Iterator[str]:
    """Whether the token's variable is set; never shows what it holds."""
    if name is None:
        return
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        # Somebody may have put the token itself there.
        yield f"{where} is no name of an environment variable, expected one such as SCORER_TOKEN."
    elif name not in os.environ:
        yield f"{where} = {name}, but there is no such environment variable. export {name}=<token>"
    elif not re.fullmatch(r"[!-~]+", os.environ[name]):
        yield f"{where} = {name}: the variable holds nothing, or more than visible ASCII."


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
    """What the server at `url` answers; the module's docstring tells the protocol.

    Args:
        prompt: sent.
        response: sent.
        example: sent.
        url: where to POST to.
        timeout_s: seconds without a sign of life after which an attempt has failed.
        retries: attempts after the first; `wait_s` lies between them.
        token_env: environment variable whose value is sent as bearer token; None: none is sent.

    Raises:
        RemoteScorerError: no attempt succeeded, or the answer is no score.
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
    """Seconds between failed attempt number `attempt` (from 0) and the next.

    0.25 * 2**attempt, spread by a factor from [0.5, 1.5) that `body` and `attempt` alone seed.
    """
    spread = random.Random(zlib.crc32(body) + attempt).uniform(0.5, 1.5)
    return FIRST_WAIT_S * 2**attempt * spread


def _post(
    url: str, body: bytes, timeout_s: float, token: str | None
) -> tuple["httpx.Response | None", str]:
    """The server's answer, or None and why it is worth another attempt."""
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
        return None, _told(answer, token)
    return answer, ""


def _score_of(answer: "httpx.Response", url: str, token: str | None) -> Score:
    """The score in an answer.

    Raises:
        RemoteScorerError: there is none.
    """
    told = f"{_shown(url)}: {_told(answer, token)}"
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


def _told(answer: "httpx.Response", token: str | None) -> str:
    """Status and beginning of an answer, for messages; without the token, should it echo that."""
    text = answer.text if token is None else answer.text.replace(token, "<token>")
    return f"answered {answer.status_code} {text[:_SHOWN_CHARS]!r}"


def _shown(url: str) -> str:
    """A URL for messages: without user, password and query, which may hold secrets."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _times(attempts: int) -> str:
    return "tried once" if attempts == 1 else f"tried {attempts} times"


@functools.cache  # a reward process calls with one setting, and keeps its connection
def _client(timeout_s: float) -> "httpx.Client":
    import httpx

    return httpx.Client(timeout=timeout_s)
