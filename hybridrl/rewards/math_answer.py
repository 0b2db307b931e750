r"""MATH's reward: 1 if the response's final answer equals the example's as mathematics, else 0.

Answers are parsed and compared by the package math-verify: 1/2 equals 0.5 and \frac{1}{2}, and
(x-1)(x+1) equals x^2 - 1. It is imported in reward processes only.

Source: Hendrycks et al. 2021, https://arxiv.org/abs/2103.03874, for the \boxed{} format;
https://github.com/huggingface/Math-Verify for what equals what
"""

import functools
import importlib.util
import logging
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from hybridrl.rewards.base import answer_reader, checked_by
from hybridrl.rewards.gsm8k import MARKER, Mode, mode_problems

BOXED = r"\boxed"
# Bounds on the text to parse: time grows faster than its length.
MAX_ANSWER_CHARS = 1000
MAX_END_CHARS = 4000
# Words are compared as text: as mathematics, "east" would be e * a * s * t, equal to "seat".
_WORDS = re.compile(r"[A-Za-z][A-Za-z ]{2,}")
# Precedes a character without a backslash escape; "\\\\" is a line break, not an escape.
_UNESCAPED = r"(?<!\\)(?:\\\\)*"
_MATHS = re.compile(_UNESCAPED + r"(?:\$(?:\\.|[^\\$])+\$|\\\(.*\\\)|\\\[.*\\\])", flags=re.DOTALL)
_UNIT = re.compile(r"\\?%|(?<!\\)\\\$")
_DOLLAR = re.compile(r"\\?\$")


def _problems(key: str, args: dict[str, Any]) -> Iterator[str]:
    """Check the mode and that the package is installed."""
    yield from mode_problems(key, args)
    if importlib.util.find_spec("math_verify") is None:
        yield (
            f"{key}.function needs the package math-verify, which is not installed.\n"
            f"Run pip install math-verify (hybridrl's extra math), or choose another reward."
        )


@answer_reader
@checked_by(_problems)
def score(prompt: str, response: str, example: dict[str, Any], mode: str) -> float:
    r"""Return 1.0 if the response's final answer equals the example's, else 0.0.

    Args:
        prompt: not read.
        response: text of the response.
        example: its "answer" is a solution with \boxed{}, one with `#### 42`, or the answer alone,
            in LaTeX with or without dollar signs.
        mode: strict: the answer is the content of the last \boxed{}; flexible: without a box, it
            follows the last `####`, or is the final answer that math-verify finds.

    Raises:
        KeyError: the example has no "answer".
        ValueError: its answer cannot be parsed, or there is no such mode.
    """
    flexible = Mode(mode) is Mode.flexible and BOXED not in response
    expected = reference_answer(example["answer"])
    answer, (_, marker, tail) = last_boxed(response), response.rpartition(MARKER)
    if flexible and marker:
        answer = tail
    if answer is not None:
        candidates = _final_answer(response) if len(answer) <= MAX_ANSWER_CHARS else []
    else:
        candidates = _parsed(_end(response)) if flexible else []
    return float(_math_verify().verify(expected, candidates, timeout_seconds=None))


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{}; None if there is none or it is not closed."""
    _, marker, tail = text.rpartition(BOXED)
    tail = tail.lstrip()
    if not marker or not tail.startswith("{"):
        return None
    depth = 0
    for match in re.finditer(r"\\.|[{}]", tail, flags=re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return tail[1 : match.start()]
    return None


def _end(text: str) -> str:
    """Return the last whole lines of `text`: a cut within a line could separate dollar signs."""
    if len(text) <= MAX_END_CHARS:
        return text
    end = text[-MAX_END_CHARS:]
    return end.partition("\n")[2] or end


@functools.lru_cache(maxsize=64)  # shared by the responses of a group
def reference_answer(answer: Any) -> list[Any]:
    r"""Parse the example's answer with math-verify.

    Raises:
        ValueError: the result is empty.
    """
    parsed = _final_answer(str(answer))
    if not parsed:
        raise ValueError(
            f"the example's answer is {str(answer)[-80:]!r}, expected an answer that math-verify "
            f"can parse; set data.answer_key to the column with the answer"
        )
    return parsed


def _final_answer(text: str) -> list[Any]:
    r"""Parse the content of the last \boxed{}, else what follows the last `####`, else `text`.

    Without mathematical delimiters, a $ is a currency symbol. If the answer is not mathematics,
    it is boxed, which math-verify compares as text.
    """
    boxed = last_boxed(text)
    if boxed is not None:
        return _parsed(f"{BOXED}{{{boxed}}}")
    text = " ".join(text.rpartition(MARKER)[2].split()).strip("*")
    if _WORDS.fullmatch(text):
        return _parsed(rf"$\text{{{text}}}$")
    if _MATHS.search(text):
        return _parsed(text)
    text = _DOLLAR.sub("", text)
    return _parsed(f"${text}$") or _parsed(f"{BOXED}{{{text}}}")


def _parsed(text: str) -> list[Any]:
    r"""Parse with math-verify; the result is empty if that fails.

    As in Hendrycks et al.'s comparison, percent and \$ are units: 50\% equals 50.
    """
    text = _UNIT.sub("", text).replace("\u2212", "-")
    # Its own time limits would replace the reward process's SIGALRM timer.
    parsed: list[Any] = _math_verify().parse(text, parsing_timeout=None)
    return parsed


@functools.cache
def _math_verify() -> ModuleType:
    """Import the package, without its warnings about missing time limits."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify
