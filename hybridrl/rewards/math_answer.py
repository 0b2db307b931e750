r"""MATH's reward: 1 if the response's final answer equals the example's as mathematics, else 0.

Answers are parsed and compared by the package math-verify: 1/2 equals 0.5 and \frac{1}{2}, and
(x-1)(x+1) equals x^2 - 1. It is imported in the reward processes alone.

Source: Hendrycks et al. 2021, https://arxiv.org/abs/2103.03874, for the \boxed{} format;
https://github.com/huggingface/Math-Verify for what equals what
"""

import functools
import logging
import re
from collections.abc import Iterator
from enum import StrEnum
from types import ModuleType
from typing import Any

from hybridrl.rewards.base import checked_by, package_problems
from hybridrl.rewards.gsm8k import MARKER

PACKAGE = "math-verify"
BOXED = r"\boxed"
# Longer than any answer, and than what ends with one: time to parse grows faster than the text.
MAX_ANSWER_CHARS = 1000
MAX_END_CHARS = 4000
# Words are compared as words: as mathematics, "east" were e * a * s * t, and equal to "seat".
_WORDS = re.compile(r"\s*[A-Za-z][A-Za-z ]{2,}\s*")
# Comes before a sign that no backslash escapes; "\\\\" is a line break, and escapes nothing.
_UNESCAPED = r"(?<!\\)(?:\\\\)*"
_MATHS = re.compile(_UNESCAPED + r"(?:\$(?:\\.|[^\\$])+\$|\\\(.*\\\)|\\\[.*\\\])", flags=re.DOTALL)
_LONE_DOLLAR = re.compile(f"({_UNESCAPED})" + r"\$")


class Mode(StrEnum):
    r"""Where the response's answer is looked for if it has no \boxed{}."""

    strict = "strict"
    flexible = "flexible"


def _problems(key: str, args: dict[str, Any]) -> Iterator[str]:
    """Whether the mode is known and the package installed."""
    if args["mode"] not in list(Mode):
        yield f"{key}.args.mode = {args['mode']}, expected one of {', '.join(Mode)}."
    yield from package_problems(key, "math_verify", PACKAGE)


@checked_by(_problems)
def score(prompt: str, response: str, example: dict[str, Any], mode: str) -> float:
    r"""1.0 if the response's final answer equals the example's, else 0.0.

    Args:
        prompt: not looked at.
        response: what the model wrote.
        example: its "answer" is a solution with \boxed{}, one with `#### 42`, or the answer alone,
            in LaTeX with or without dollar signs.
        mode: strict: the answer is what the last \boxed{} holds, and nothing else; flexible:
            where there is none, what math-verify takes for the final answer.

    Raises:
        KeyError: the example has no "answer".
        ValueError: its answer cannot be read, or there is no such mode.
    """
    flexible = Mode(mode) is Mode.flexible
    expected = reference_answer(example["answer"])
    boxed = last_boxed(response)
    if boxed is not None:
        found = f"{BOXED}{{{boxed}}}" if len(boxed) <= MAX_ANSWER_CHARS else ""
    else:
        found = _end(response) if flexible and BOXED not in response else ""
    # The scorer limits the time; math-verify's own limit would take the scorer's alarm away.
    answers = _math_verify().parse(found, parsing_timeout=None)
    return float(_math_verify().verify(expected, answers, timeout_seconds=None))


def last_boxed(text: str) -> str | None:
    r"""What the last \boxed{} of `text` holds; None if there is none or it is not closed."""
    _, found, tail = text.rpartition(BOXED)
    tail = tail.lstrip()
    if not found or not tail.startswith("{"):
        return None
    depth, escaped = 0, False
    for index, char in enumerate(tail):
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif char in "{}":
            depth += 1 if char == "{" else -1
            if depth == 0:
                return tail[1:index]
    return None


def _end(text: str) -> str:
    """The last lines of `text`; whole ones, or a cut would tear dollar signs apart."""
    if len(text) <= MAX_END_CHARS:
        return text
    end = text[-MAX_END_CHARS:]
    return end.partition("\n")[2] or end


@functools.lru_cache(maxsize=64)  # the responses of a group share it
def reference_answer(answer: Any) -> list[Any]:
    r"""The example's answer as math-verify reads it.

    Raises:
        ValueError: it reads nothing there; guessing would reward wrong responses.
    """
    text = str(answer)
    boxed = last_boxed(text)
    if boxed is not None:
        parsed = _parsed(f"{BOXED}{{{boxed}}}")
    elif MARKER in text:
        parsed = _parsed_alone(text.rpartition(MARKER)[2])
    elif _WORDS.fullmatch(text):
        parsed = _parsed(rf"$\text{{{text.strip()}}}$")
    else:
        parsed = _parsed(text) if _MATHS.search(text) else _parsed_alone(text)
    if not parsed:
        raise ValueError(
            f"the example's answer is {str(answer)[-80:]!r}, expected an answer that {PACKAGE} "
            f"can read; set data.answer_key to the column that holds it"
        )
    return parsed


def _parsed_alone(text: str) -> list[Any]:
    """What math-verify reads in an answer that nothing marks as mathematics; a $ in it is money.

    What it cannot read as mathematics it compares as text if it stands in a box.
    """
    text = _LONE_DOLLAR.sub(r"\1\$", " ".join(text.split()))
    return _parsed(f"${text}$") or _parsed(f"{BOXED}{{{text}}}")


def _parsed(text: str) -> list[Any]:
    """What math-verify reads; nothing where it fails."""
    parsed: list[Any] = _math_verify().parse(text, parsing_timeout=None)
    return parsed


@functools.cache
def _math_verify() -> ModuleType:
    """The package, without its warning that no limit of its own is set."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify
