"""Calls of reward functions with our signature, verl's or TRL's, awaited or not.

An item is one response. For a TRL function it may be a list of responses: all to one prompt, which
the function may compare. The result is a Score, or a list with a Score or None for each response.
"""

import asyncio
import inspect
import math
import numbers
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hybridrl.config.choices import RewardSignature
from hybridrl.config.errors import Problem
from hybridrl.config.schema import RewardConfig
from hybridrl.config.user_code.classes import function_at
from hybridrl.config.user_code.importing import try_out
from hybridrl.config.user_code.signatures import CALLS, check_signature, inputs_of, is_async
from hybridrl.processes.child import ItemTimeout, limited
from hybridrl.processes.process import environment_for
from hybridrl.rewards.base import RewardItem, Score, WrongScore, as_score

TRY_REWARD = "hybridrl.rewards.calls.try_reward"
# Errors of a program rather than of its surroundings.
MISTAKES = (TypeError, LookupError, AttributeError, NameError, ImportError, AssertionError)


@dataclass(frozen=True)
class RewardCall:
    """Reward function and how it is called.

    Attributes:
        function: the reward.
        args: keyword arguments of every call.
        signature: of the function; not auto.
        name: dotted path, for messages.
    """

    function: Callable[..., Any]
    args: dict[str, Any]
    signature: RewardSignature
    name: str

    @property
    def is_async(self) -> bool:
        """Return whether `score_later` must be used."""
        return is_async(self.function, self.args)

    def score(self, item: Any) -> Any:
        """Return the result of an item; raise as the function and `as_score` do."""
        return self._read(self._call(item), item)

    async def score_later(self, item: Any) -> Any:
        """Return as `score` does, of an async function or another one."""
        value = self._call(item)
        return self._read(await value if inspect.isawaitable(value) else value, item)

    def _call(self, item: Any) -> Any:
        positional, keywords = inputs_of(self.function, self.signature, _rows(item), self.args)
        return self.function(*positional, **keywords)

    def _read(self, value: Any, item: Any) -> Any:
        if self.signature is RewardSignature.trl:
            scores = _trl_scores(value, len(_rows(item)), self.name)
            return scores if isinstance(item, list) else scores[0]
        if self.signature is RewardSignature.verl and isinstance(value, dict):
            return _verl_score(value, self.name)
        return as_score(value, self.name)


def reward_call(
    key: str,
    function: str,
    args: dict[str, Any],
    signature: RewardSignature = RewardSignature.auto,
) -> RewardCall:
    """Return the call of a reward, checked before; `key` is its section or the part of a sum.

    Raises:
        ConfigError: there is no such function, or it fits no signature.
    """
    reward = function_at(key, function)
    name = function if key == "reward" else f"{key}, {function},"
    return RewardCall(reward, args, check_signature(key, function, reward, args, signature), name)


def reward_task(
    function: str, args: dict[str, Any], signature: RewardSignature
) -> Callable[[Any], Any]:
    """Return the task of a reward process, item -> result; async if the reward is."""
    call = reward_call("reward", function, args, signature)
    return call.score_later if call.is_async else call.score


def trial_problems(
    config: RewardConfig, prompt: str, example: dict[str, Any], response: str
) -> list[Problem]:
    """Try a user's reward on the reference answer of a row, or an empty one; return the problems.

    A mistake of the program and a result that is no number are problems. Other errors may have
    their cause elsewhere, such as a server that is not there yet.
    """
    tried = "the reference answer of" if response else "an empty response to"
    what = f"its trial on {tried} the first row"
    item: RewardItem = (prompt, response, example, [])
    return try_out("reward.function", config.function, what, TRY_REWARD, config, item)


def try_reward(key: str, path: str, config: RewardConfig, item: RewardItem) -> list[str]:
    """Score an item, in a trial's process; return the problems."""
    withheld = os.environ.keys() - environment_for(config.args).keys()
    for name in withheld:
        del os.environ[name]
    call = reward_call("reward", path, config.args, config.signature)
    try:
        limited(lambda item: asyncio.run(call.score_later(item)), item, config.timeout_s)
    except WrongScore as error:
        return [f"{key} = {path}: {error}, {CALLS[call.signature]}."]
    except MISTAKES as error:
        name = str(*error.args[:1])
        if name in withheld:
            return [
                f"{key} = {path}: reward processes start without {name}.\n"
                f"To pass it on, name it in an argument: +reward.args.token_env={name}"
            ]
        raise
    except (Exception, ItemTimeout):
        pass
    return []


def _verl_score(value: dict[str, Any], name: str) -> Score:
    """Return the score of verl's dict; its other numbers are parts."""
    if "score" not in value:
        raise WrongScore(f"{name} returned a dict without score")
    parts = {
        key: float(part)
        for key, part in value.items()
        if key != "score"
        and re.fullmatch(r"\w+", str(key))
        and isinstance(part, numbers.Real)
        and math.isfinite(part)
    }
    return as_score(Score(value["score"], parts), name)


def _rows(item: RewardItem | list[RewardItem]) -> list[RewardItem]:
    return item if isinstance(item, list) else [item]


def _trl_scores(value: Any, count: int, name: str) -> list[Score | None]:
    try:
        values = list(value)
    except TypeError:
        raise WrongScore(
            f"{name} returned a {type(value).__name__}, expected a list of numbers, one per "
            f"completion"
        ) from None
    if len(values) != count:
        raise WrongScore(f"{name} returned {len(values)} numbers for {count} completions")
    return [None if each is None else as_score(each, name) for each in values]
