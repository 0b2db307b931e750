"""Remote scorer: requests each response's score from an HTTP server.

    POST <url>                      Content-Type: application/json
    {"prompt": "...", "response": "...", "example": {...}}

    200
    {"score": 0.75, "parts": {"style": 0.5}}

The example is the row of the data set; values that JSON lacks are sent as text. "parts" is
optional; each part becomes the metric reward/part_<name>. A malformed answer fails the response.

At most reward.concurrency requests are under way. reward.timeout_s must exceed the time of all
attempts and the waits between them.
"""

from collections.abc import Iterator
from typing import Any

from hybridrl.rewards.base import Score, checked_by
from hybridrl.rewards.remote import RemoteScorerError, Server, post, server_problems


def _problems(key: str, args: dict[str, Any]) -> Iterator[str]:
    """Check the arguments, without a request to the server."""
    return server_problems(f"{key}.args", args, "url", "token_env")


@checked_by(_problems)
async def score(
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
        url, timeout_s, retries, token_env: of the `Server`.

    Raises:
        RemoteScorerError: no attempt succeeded, or the answer is not a score.
    """
    content = {"prompt": prompt, "response": response, "example": example}
    answer, excerpt = await post(Server(url, timeout_s, retries, token_env), content)
    match answer:
        case {"score": value, "parts": dict() as parts}:
            return Score(value, parts)
        case {"score": value} if "parts" not in answer:
            return Score(value, {})
    raise RemoteScorerError(f'{excerpt}, expected {{"score": <number>, "parts": {{...}}}}')
