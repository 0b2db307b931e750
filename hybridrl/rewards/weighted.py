"""Weighted sum of rewards."""

from collections.abc import Iterator
from typing import Any

from hybridrl.config.errors import ConfigError
from hybridrl.config.user_code.classes import check_reward_function, locate
from hybridrl.rewards.base import (
    Rule,
    Score,
    as_score,
    checked_by,
    is_number,
    section_problems,
    value_problems,
)

_CALL: dict[str, Rule] = {
    "function": ("dotted path of a reward", lambda value: isinstance(value, str)),
    "args": ("its arguments, {} for none", lambda value: isinstance(value, dict)),
}
_RULES = _CALL | {"weight": ("a finite number", is_number)}


def _problems(key: str, args: dict[str, Any]) -> Iterator[str]:
    """Check the parts, each as a separate reward."""
    where, parts = f"{key}.args.parts", args["parts"]
    if not isinstance(parts, dict) or not parts:
        yield f"{where} = {parts}, expected names, each with {', '.join(_RULES)}."
        return
    for name, part in parts.items():
        yield from _part_problems(f"{where}.{name}", str(name), part)


def _part_problems(key: str, name: str, part: Any) -> Iterator[str]:
    if not name.isidentifier():
        yield f"{key}: expected a name of letters, digits and _, for reward/part_<name>."
    if not isinstance(part, dict):
        yield f"{key} = {part}, expected a section with {', '.join(_RULES)}. Remove it with ~{key}."
        return
    yield from section_problems(key, part, _RULES)
    if any(value_problems(key, part, _CALL)):
        return
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
        prompt, response, example: arguments of the parts.
        parts: by name, each {function: dotted path, args: its arguments, weight: a number}. A
            weight may be negative, or 0 for a part that is only a metric.
    """
    total, scores = 0.0, {}
    for name, part in parts.items():
        function = locate(f"part {name}", part["function"])
        value = function(prompt, response, example, **part["args"])
        found = as_score(value, f"part {name}, {part['function']},")
        total += part["weight"] * found.total
        scores[name] = found.total
        scores |= {f"{name}_{inner}": number for inner, number in found.parts.items()}
    return Score(total, scores)
