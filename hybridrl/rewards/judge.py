"""LLM judge: asks a model behind an OpenAI-compatible server to grade each response.

    POST <base_url>/chat/completions
    {"model": "...", "messages": [{"role": "user", "content": <template>}], "max_tokens": 256, ...}

The score is the last number in the reply that a regular expression finds, times a factor.

Source: https://platform.openai.com/docs/api-reference/chat/create, which vLLM and SGLang serve too
"""

import re
import string
from collections.abc import Iterator
from typing import Any

from hybridrl.rewards.base import Rule, at_least, checked_by, is_number, value_problems
from hybridrl.rewards.remote import RemoteScorerError, Server, post, server_problems

# Columns that may hold the question.
_QUESTIONS = ("question", "prompt", "problem")


def _fields(template: str) -> set[str | None]:
    return {name for _, name, _, _ in string.Formatter().parse(template)}


def _has_response(template: Any) -> bool:
    try:
        return "response" in _fields(template)
    except (TypeError, ValueError):
        return False


def _finds_number(pattern: Any) -> bool:
    try:
        return re.compile(pattern).groups <= 1
    except (re.error, OverflowError, RecursionError, TypeError):
        return False


_RULES: dict[str, Rule] = {
    "model": ("the name of a model", lambda name: isinstance(name, str) and name != ""),
    "max_tokens": at_least(1),
    "temperature": ("a number of at least 0", lambda value: is_number(value) and value >= 0),
    "scale": ("a finite number", is_number),
    "template": ("a text with {response}, and {{ and }} for other braces", _has_response),
    "number": ("a regular expression with at most one group (...)", _finds_number),
}


def _problems(key: str, args: dict[str, Any]) -> Iterator[str]:
    """Check the arguments, without a request to the server."""
    where = f"{key}.args"
    yield from server_problems(where, args, "base_url", "api_key_env")
    yield from value_problems(where, args, _RULES)


@checked_by(_problems)
async def score(
    prompt: str,
    response: str,
    example: dict[str, Any],
    base_url: str,
    model: str,
    api_key_env: str | None,
    template: str,
    number: str,
    scale: float,
    max_tokens: int,
    temperature: float,
    timeout_s: float,
    retries: int,
) -> float:
    """Return the judge's number for a response, times `scale`.

    Args:
        prompt: the rendered prompt, {prompt} of the template.
        response: {response} of the template.
        example: its columns are fields of the template, too; {question} is its column question,
            prompt (of messages the last user's) or problem, else the rendered prompt.
        base_url: ends in /v1 as a rule; requests go to <base_url>/chat/completions.
        model: that grades.
        api_key_env, timeout_s, retries: of the `Server`.
        template: text of the one user message.
        number: regular expression, whose last match in the reply is the number; with a group, the
            group.
        scale: factor.
        max_tokens, temperature: of the reply.

    Raises:
        RemoteScorerError: no attempt succeeded, or the reply has no number.
        KeyError: the template has a field that is no column of the example.
    """
    texts = {"question": _question(prompt, example), "prompt": prompt, "response": response}
    content = {
        "model": model,
        "messages": [{"role": "user", "content": template.format_map(example | texts)}],
        "max_tokens": max_tokens,
        "temperature": temperature,
    }
    url = f"{base_url.rstrip('/')}/chat/completions"
    answer, excerpt = await post(Server(url, timeout_s, retries, api_key_env), content)
    match answer:
        case {"choices": [{"message": {"content": str() as reply}}, *_]}:
            return scale * _number(reply, number)
    raise RemoteScorerError(f"{excerpt}, expected choices with a message of text")


def _shows_answer(args: dict[str, Any]) -> bool:
    return "answer" in _fields(args["template"])


score.reads_answer = _shows_answer  # type: ignore[attr-defined]


def _question(prompt: str, example: dict[str, Any]) -> str:
    for column in _QUESTIONS:
        match example.get(column):
            case str() as text:
                return text
            case [*messages] if messages:
                users = [m for m in messages if isinstance(m, dict) and m.get("role") == "user"]
                return str((users or messages)[-1].get("content", ""))
    return prompt


def _number(reply: str, pattern: str) -> float:
    """Return the last number that the pattern finds; raise RemoteScorerError without one."""
    numbers = re.findall(pattern, reply)
    try:
        return float(numbers[-1])
    except (IndexError, ValueError):
        raise RemoteScorerError(f"the judge's reply has no number: {reply[-200:]!r}") from None
