"""Weighted sum of rewards."""

from collections.abc import Awaitable, Iterator, Sequence
from typing import Any

from hybridrl.config.errors import Problem, raised_problems
from hybridrl.config.user_code.classes import check_reward_function
from hybridrl.config.user_code.signatures import reads_answer
from hybridrl.rewards.base import (
    RewardItem,
    Rule,
    Score,
    checked_by,
    is_number,
    section_problems,
    value_problems,
)
from hybridrl.rewards.calls import RewardCall, reward_call

_CALL: dict[str, Rule] = {
    "function": ("dotted path of a reward", lambda value: isinstance(value, str)),
    "args": ("its arguments, {} for none", lambda value: isinstance(value, dict)),
}
_RULES = _CALL | {"weight": ("a finite number", is_number)}


def _problems(key: str, args: dict[str, Any]) -> Iterator[Problem | str]:
    """Check the parts, each as a separate reward."""
    where, parts = f"{key}.args.parts", args["parts"]
    if not isinstance(parts, dict) or not parts:
        yield (
            f"{where} = {parts}, expected names, each with {', '.join(_RULES)}.\n"
            f"Set reward.function=[a.py:f,b.py:g] for a plain sum, or +{where}.<name>="
            f"'{{function: a.py:f, args: {{}}, weight: 1.0}}' for each part."
        )
        return
    for name, part in parts.items():
        yield from _part_problems(f"{where}.{name}", str(name), part)


def _part_problems(key: str, name: str, part: Any) -> Iterator[Problem | str]:
    if not name.isidentifier():
        yield f"{key}: expected a name of letters, digits and _, for reward/part_<name>."
    if not isinstance(part, dict):
        yield f"{key} = {part}, expected a section with {', '.join(_RULES)}. Remove it with ~{key}."
        return
    yield from section_problems(key, part, _RULES)
    if not any(value_problems(key, part, _CALL)):
        yield from raised_problems(check_reward_function, key, part["function"], part["args"])


@checked_by(_problems)
def score(
    prompt: str,
    response: str,
    example: dict[str, Any],
    ids: Sequence[int] = (),
    *,
    parts: dict[str, dict[str, Any]],
) -> Score | Awaitable[Score]:
    """Return the sum over `parts` of weight * score; the scores of the parts become metrics.

    It is to be awaited if a part is async. reward.timeout_s limits all parts together. If a part
    fails, the whole fails; a TRL function that returns None for a response is left out.

    Args:
        prompt, response, example, ids: arguments of the parts.
        parts: by name, each {function: dotted path, args: its arguments, weight: a number}. A
            weight may be negative, or 0 for a part that is only a metric.
    """
    item, calls = (prompt, response, example, list(ids)), _calls(parts)
    if any(call.is_async for call in calls.values()):
        return _sum_later(item, calls, parts)
    return _sum({name: call.score(item) for name, call in calls.items()}, parts)


def _has_async_part(args: dict[str, Any]) -> bool:
    return any(call.is_async for call in _calls(args["parts"]).values())


def _has_part_with_answer(args: dict[str, Any]) -> bool:
    return any(reads_answer(call.function, call.args) for call in _calls(args["parts"]).values())


score.is_async = _has_async_part  # type: ignore[attr-defined]
score.reads_answer = _has_part_with_answer  # type: ignore[attr-defined]


def _calls(parts: dict[str, dict[str, Any]]) -> dict[str, RewardCall]:
    return {
        name: reward_call(f"part {name}", part["function"], part["args"])
        for name, part in parts.items()
    }


async def _sum_later(
    item: RewardItem, calls: dict[str, RewardCall], parts: dict[str, dict[str, Any]]
) -> Score:
    return _sum({name: await call.score_later(item) for name, call in calls.items()}, parts)


def _sum(scores: dict[str, Score | None], parts: dict[str, dict[str, Any]]) -> Score:
    total, numbers = 0.0, dict[str, float]()
    for name, score in scores.items():
        if score is None:
            continue
        total += parts[name]["weight"] * score.total
        numbers[name] = score.total
        numbers |= {f"{name}_{inner}": number for inner, number in score.parts.items()}
    return Score(total, numbers)
