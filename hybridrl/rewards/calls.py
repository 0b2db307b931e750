"""Calls of reward functions with our signature, verl's or TRL's, awaited or not.

An item is one response. For a TRL function it may be a list of responses: all to one prompt, which
the function may compare.
"""

import inspect
import math
import numbers
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from hybridrl.config.choices import RewardSignature
from hybridrl.config.user_code.classes import locate
from hybridrl.config.user_code.signatures import accepted, check_signature, is_async
from hybridrl.rewards.base import RewardItem, Score, as_score


class RewardCall(ABC):
    """Reward function and its arguments, called by its signature.

    Args:
        function: the reward.
        args: keyword arguments of every call.
        name: dotted path, for messages.

    Attributes:
        is_async: True if `score_later` must be used.
    """

    def __init__(self, function: Callable[..., Any], args: dict[str, Any], name: str) -> None:
        self.is_async = is_async(function, args)
        self._function = function
        self._args = args
        self._name = name

    def score(self, item: Any) -> Any:
        """Return the Score of an item; raise as the function and `as_score` do."""
        return self._read(self._call(item), item)

    async def score_later(self, item: Any) -> Any:
        """Return as `score` does, of an async function or another one."""
        found = self._call(item)
        return self._read(await found if inspect.isawaitable(found) else found, item)

    @abstractmethod
    def _call(self, item: Any) -> Any: ...

    def _read(self, value: Any, item: Any) -> Any:
        return as_score(value, self._name)


class OwnCall(RewardCall):
    """Calls (prompt, response, example, **args) -> number or Score."""

    def _call(self, item: RewardItem) -> Any:
        return self._function(*item[:3], **self._args)


class VerlCall(RewardCall):
    """Calls verl's (data_source, solution_str, ground_truth, extra_info, **args).

    It returns a number, or a dict of "score" and further values, of which the numbers are parts.
    """

    def _call(self, item: RewardItem) -> Any:
        example = item[2]
        keywords = {
            "data_source": example.get("data_source", example.get("dataset", "")),
            "solution_str": item[1],
            "ground_truth": example["answer"],
            "extra_info": example.get("extra_info") or {},
        }
        return self._function(**accepted(self._function, keywords) | self._args)

    def _read(self, value: Any, item: Any) -> Score:
        if not isinstance(value, dict):
            return as_score(value, self._name)
        if "score" not in value:
            raise TypeError(f"{self._name} returned a dict without score")
        parts = {
            name: float(part)
            for name, part in value.items()
            if name != "score" and re.fullmatch(r"\w+", str(name)) and _is_finite(part)
        }
        return as_score(Score(value["score"], parts), self._name)


class TRLCall(RewardCall):
    """Calls TRL's (prompts, completions, **columns) -> list of numbers or None.

    An item is one response, or a list of responses with a list of scores; None stays None. As in
    TRL, prompts and completions are lists of messages if the row's column prompt is one. There is
    no trainer_state, and what log_extra and log_metric record is not kept.
    """

    def _call(self, item: RewardItem | list[RewardItem]) -> Any:
        rows = item if isinstance(item, list) else [item]
        examples = [row[2] for row in rows]
        asked = [row[2].get("prompt", row[0]) for row in rows]
        keywords: dict[str, Any] = {
            name: [example.get(name) for example in examples]
            for name in examples[0]
            if name not in ("prompt", "completion", "completion_ids")
        }
        keywords |= {
            "prompts": asked,
            "completions": [
                [{"role": "assistant", "content": row[1]}] if isinstance(prompt, list) else row[1]
                for row, prompt in zip(rows, asked, strict=True)
            ],
            "trainer_state": None,
            "log_extra": _ignore,
            "log_metric": _ignore,
        }
        if all(len(row) > 3 for row in rows):
            keywords["completion_ids"] = [row[3] for row in rows]  # type: ignore[misc]
        return self._function(**accepted(self._function, keywords) | self._args)

    def _read(self, value: Any, item: RewardItem | list[RewardItem]) -> Any:
        count = len(item) if isinstance(item, list) else 1
        try:
            values = list(value)
        except TypeError:
            raise TypeError(
                f"{self._name} returned a {type(value).__name__}, expected a list of numbers, one "
                f"per completion"
            ) from None
        if len(values) != count:
            raise ValueError(f"{self._name} returned {len(values)} numbers for {count} completions")
        scores = [None if each is None else as_score(each, self._name) for each in values]
        return scores if isinstance(item, list) else scores[0]


_CLASSES: dict[RewardSignature, type[RewardCall]] = {
    RewardSignature.hybridrl: OwnCall,
    RewardSignature.verl: VerlCall,
    RewardSignature.trl: TRLCall,
}


def reward_call(
    key: str,
    function: str,
    args: dict[str, Any],
    signature: RewardSignature = RewardSignature.auto,
) -> RewardCall:
    """Return the call of a reward, checked before, at a dotted path.

    Args:
        key: its section, "reward" or the part of a sum; for messages.
        function: dotted path.
        args: keyword arguments of every call.
        signature: auto: by its parameter names.

    Raises:
        ConfigError: there is no such function, or it fits no signature.
    """
    found = locate(key, function)
    signature = check_signature(key, function, found, args, signature)
    name = function if key == "reward" else f"{key}, {function},"
    return _CLASSES[signature](found, args, name)


def reward_task(
    function: str, args: dict[str, Any], signature: RewardSignature
) -> Callable[[Any], Any]:
    """Return the task of a reward process, item -> Score; async if the reward is."""
    call = reward_call("reward", function, args, signature)
    return call.score_later if call.is_async else call.score


def _is_finite(value: Any) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)


def _ignore(*_: Any) -> None:
    """Stand for TRL's log_extra and log_metric."""
