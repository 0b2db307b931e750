"""Signatures of reward functions: ours, verl's and TRL's, recognised by parameter names.

Sources: verl, https://verl.readthedocs.io/en/latest/preparation/reward_function.html;
TRL, https://huggingface.co/docs/trl/grpo_trainer#using-a-custom-reward-function
"""

import inspect
from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Any, Protocol, runtime_checkable

from hybridrl.config.choices import RewardSignature
from hybridrl.config.errors import ConfigError
from hybridrl.config.keys import similar_siblings

# The call of each signature, for messages.
CALLS = {
    RewardSignature.hybridrl: "(prompt, response, example, **args) -> number or Score",
    RewardSignature.verl: (
        "(data_source, solution_str, ground_truth, extra_info=None, **args) -> number, or dict "
        "with score"
    ),
    RewardSignature.trl: "(prompts, completions, **columns) -> list of numbers",
}
OURS = ("prompt", "response", "example")
# Keywords that verl and TRL pass; of the others, a column of the row.
VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
TRL = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
# A parameter of this name tells whose function it is.
_TELLING = {
    "solution_str": RewardSignature.verl,
    "completions": RewardSignature.trl,
    "completion_ids": RewardSignature.trl,
}


@runtime_checkable
class CallsOthers(Protocol):
    """A reward that calls others, such as a weighted sum."""

    def is_async(self, args: dict[str, Any]) -> bool:
        """Return whether a call with these args gives an awaitable."""
        ...


def is_async(function: Callable[..., Any], args: dict[str, Any]) -> bool:
    """Return whether a reward's calls with these args are awaited."""
    if isinstance(function, CallsOthers):
        return function.is_async(args)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__
    )


def recognised(function: Callable[..., Any]) -> RewardSignature | None:
    """Return the signature of a reward function by its parameter names; None if it fits none.

    Ours alone is called by position, so *args fits it. Underscores around its names do not count.
    """
    parameters = inspect.signature(function).parameters
    for name, signature in _TELLING.items():
        if name in parameters:
            return signature
    for name, ours in zip_longest(list(parameters)[: len(OURS)], OURS, fillvalue="missing"):
        if name in parameters and parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
            break
        if name.strip("_") not in ("", ours):
            return None
    return RewardSignature.hybridrl


def accepted(function: Callable[..., Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords that a function takes: all, or those that it names."""
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {name: value for name, value in keywords.items() if takes_all or name in parameters}


def check_signature(
    key: str,
    path: str,
    function: Callable[..., Any],
    args: dict[str, Any],
    signature: RewardSignature = RewardSignature.auto,
) -> RewardSignature:
    """Return the signature of a reward function, recognised or as `signature` says.

    Args:
        key: section with function and args, for messages.
        path: that names the function, for messages.
        function: called with args as keywords besides the signature's.
        signature: `reward.signature`; auto for evaluation rules and parts of sums.

    Raises:
        ConfigError: its parameters fit no signature, or args do not fit its parameters.
    """
    by_names = recognised(function)
    found = by_names if signature is RewardSignature.auto else signature
    if by_names not in (None, found):
        raise ConfigError(
            f"{key}.signature = {found}, but {key}.function = {path} has the parameter names of "
            f"{by_names}: {inspect.signature(function)}.\nSet {key}.signature={by_names}."
        )
    if found is None:
        calls = "\n".join(f"  {name.value:<9} {call}" for name, call in CALLS.items())
        named = " or set reward.signature=<name>" if key == "reward" else ""
        raise ConfigError(
            f"{key}.function = {path} has the signature {inspect.signature(function)}, expected "
            f"the parameter names of one of these:\n{calls}\n"
            f"Rename its parameters{named}."
        )
    positional, keywords = _trial_call(function, args, found)
    check_arguments(key, path, function, positional, args, CALLS[found], keywords)
    return found


def check_arguments(
    key: str,
    path: str,
    function: Callable[..., Any],
    positional: tuple[Any, ...],
    args: dict[str, Any],
    call: str,
    keywords: Mapping[str, Any] | None = None,
) -> None:
    """Raise a ConfigError unless a function can be called with these inputs and its args."""
    signature = inspect.signature(function)
    try:
        signature.bind(*positional, **(keywords or {}), **args)
    except TypeError as error:
        known = list(signature.parameters)[len(positional) :]
        raise ConfigError(
            f"{key}.function = {path} cannot be called with {key}.args = {args}: {error}.\n"
            f"Its signature is {signature}; the call is {call}. "
            f"{_similar_args(key, args, known)}Remove or rename keys of {key}.args."
        ) from error


def _trial_call(
    function: Callable[..., Any], args: dict[str, Any], signature: RewardSignature
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword inputs of a call; a row has any column that TRL's ask for."""
    if signature is RewardSignature.hybridrl:
        return ("prompt", "response", {}), {}
    names = dict.fromkeys(VERL if signature is RewardSignature.verl else TRL, "")
    if signature is RewardSignature.trl:
        parameters = inspect.signature(function).parameters.values()
        named = (p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
        names |= {p.name: "" for p in named if p.default is p.empty}
    return (), accepted(function, {name: "" for name in names if name not in args})


def _similar_args(key: str, args: dict[str, Any], known: list[str]) -> str:
    """Return "Did you mean ...? " for args that are no parameters; empty without similar ones."""
    unknown = [name for name in args if name not in known]
    near = [found for name in unknown for found in similar_siblings(f"{key}.args.{name}", known)]
    return f"Did you mean {' or '.join(near)}? " if near else ""
