"""Weighted sum of rewards."""

import math
import numbers
from collections.abc import Iterator
from typing import Any

from hybridrl.config.errors import ConfigError
from hybridrl.config.keys import unknown_sibling
from hybridrl.config.user_code.classes import check_reward_function
from hybridrl.rewards.base import Score, as_score, checked_by, resolve_function

KEYS = ("function", "args", "weight")


def _problems(key: str, args: dict[str, Any]) -> Iterator[str]:
    """Check the parts, each as a separate reward."""
    where, parts = f"{key}.args.parts", args["parts"]
    if not isinstance(parts, dict) or not parts:
        yield f"{where} = {parts}, expected names, each with {', '.join(KEYS)}."
        return
    for name, part in parts.items():
        yield from _part_problems(f"{where}.{name}", str(name), part)


def _part_problems(key: str, name: str, part: Any) -> Iterator[str]:
    if not name.isidentifier():
        yield f"{key}: expected a name of letters, digits and _, for reward/part_<name>."
    if not isinstance(part, dict):
        yield f"{key} = {part}, expected a section with {', '.join(KEYS)}. Remove it with ~{key}."
        return
    for unknown in part.keys() - set(KEYS):
        yield unknown_sibling(f"{key}.{unknown}", part[unknown], KEYS)
    missing = [known for known in KEYS if known not in part]
    for known in missing:
        yield f"{key}.{known} is missing. Set +{key}.{known}=<{_EXPECTED[known]}>."
    yield from _value_problems(key, part, missing)


_EXPECTED = {
    "function": "dotted path of a reward",
    "args": "its arguments, {} for none",
    "weight": "a finite number",
}


def _value_problems(key: str, part: dict[str, Any], missing: list[str]) -> Iterator[str]:
    """Check the types of a part's values, then run the part's own checks."""
    fits = {
        "function": lambda value: isinstance(value, str),
        "args": lambda value: isinstance(value, dict),
        "weight": lambda value: (
            isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
        ),
    }
    present = [known for known in KEYS if known not in missing]
    bad = [known for known in present if not fits[known](part[known])]
    for known in bad:
        yield f"{key}.{known} = {part[known]}, expected {_EXPECTED[known]}."
    if not {"function", "args"} & {*missing, *bad}:
        try:
            check_reward_function(key, part["function"], part["args"])
        except ConfigError as error:
            yield from error.problems


@checked_by(_problems)
def score(
    prompt: str, response: str, example: dict[str, Any], parts: dict[str, dict[str, Any]]
) -> Score:
    """Return the sum over `parts` of weight * score; the scores of the parts become metrics.

    reward.timeout_s limits all parts together. If a part fails, the whole fails.

    Args:
        prompt: argument of the parts.
        response: argument of the parts.
        example: argument of the parts.
        parts: by name, each {function: dotted path, args: its arguments, weight: a number}. A
            weight may be negative, or 0 for a part that is only a metric.
    """
    total, scores = 0.0, {}
    for name, part in parts.items():
        function = resolve_function(part["function"])
        value = function(prompt, response, example, **part["args"])
        found = as_score(value, f"part {name}, {part['function']},")
        total += part["weight"] * found.total
        scores[name] = found.total
        scores |= {f"{name}_{inner}": number for inner, number in found.parts.items()}
    return Score(total, scores)
