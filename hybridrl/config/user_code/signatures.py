"""Signatures of reward functions, ours, verl's and TRL's: how each is recognised and called.

A row is one response: prompt, response, example and, for TRL functions, the response's token ids.

Sources: verl, https://verl.readthedocs.io/en/latest/preparation/reward_function.html;
TRL, https://huggingface.co/docs/trl/grpo_trainer#using-a-custom-reward-function
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Protocol, runtime_checkable

from hybridrl.config.choices import RewardSignature
from hybridrl.config.errors import ConfigError, Problem, must_be
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
# A parameter of this name tells whose function it is.
_TELLING = {
    "solution_str": RewardSignature.verl,
    "completions": RewardSignature.trl,
    "completion_ids": RewardSignature.trl,
}


@runtime_checkable
class CallsOthers(Protocol):
    """A reward that calls others, such as a weighted sum; it gets the token ids, too."""

    def is_async(self, args: dict[str, Any]) -> bool:
        """Return whether a call with these args gives an awaitable."""
        ...


@runtime_checkable
class ReadsAnswer(Protocol):
    """A function that knows whether it reads the answer of a row."""

    def reads_answer(self, args: dict[str, Any]) -> bool:
        """Return whether a call with these args reads example["answer"]."""
        ...


def reads_answer(function: Callable[..., Any], args: dict[str, Any]) -> bool:
    """Return whether a function is known to read the answer of a row; a trial finds others."""
    if isinstance(function, ReadsAnswer):
        return function.reads_answer(args)
    truth = inspect.signature(function).parameters.get("ground_truth")
    return truth is not None and _is_required(truth)


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


def inputs_of(
    function: Callable[..., Any],
    signature: RewardSignature,
    rows: Sequence[tuple[Any, ...]],
    args: Mapping[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments of a call for a row; of TRL's, for all `rows`.

    Keywords are those that the function takes, and the args, which come first.
    """
    if signature is RewardSignature.hybridrl:
        return rows[0] if isinstance(function, CallsOthers) else rows[0][:3], dict(args)
    given = _verl_inputs(*rows[0][1:3]) if signature is RewardSignature.verl else _trl_inputs(rows)
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    taken = {name: value for name, value in given.items() if takes_all or name in parameters}
    return (), {**taken, **args}


def _verl_inputs(response: str, example: dict[str, Any]) -> dict[str, Any]:
    inputs = {
        "data_source": example.get("data_source", example.get("dataset", "")),
        "solution_str": response,
        "extra_info": example.get("extra_info") or {},
    }
    return inputs | ({"ground_truth": example["answer"]} if "answer" in example else {})


def _trl_inputs(rows: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    """Return TRL's keywords: messages if the column prompt has some, and every other column."""
    examples = [row[2] for row in rows]
    prompts = [row[2].get("prompt", row[0]) for row in rows]
    inputs: dict[str, Any] = {
        name: [example.get(name) for example in examples]
        for name in examples[0]
        if name not in ("prompt", "completion", "completion_ids")
    }
    completions = [
        [{"role": "assistant", "content": row[1]}] if isinstance(prompt, list) else row[1]
        for row, prompt in zip(rows, prompts, strict=True)
    ]
    ids = [row[3] for row in rows if len(row) > 3]
    inputs |= {"completion_ids": ids} if ids else {}
    inputs |= {"trainer_state": None, "log_extra": _ignore, "log_metric": _ignore}
    return inputs | {"prompts": prompts, "completions": completions}


def _ignore(*_: Any) -> None:
    """Stand for TRL's log_extra and log_metric."""


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
    accepted = by_names if signature is RewardSignature.auto else signature
    if by_names not in (None, accepted):
        why = f"{key}.function = {path} has its parameter names: {inspect.signature(function)}"
        raise ConfigError(must_be("signature", f"{key}.signature", accepted, by_names, why))
    if accepted is None:
        calls = "\n".join(f"  {name.value:<9} {call}" for name, call in CALLS.items())
        named = " or set reward.signature=<name>" if key == "reward" else ""
        expected = f"the parameter names of one of these:\n{calls}\n"
        why, remedy = f"it has {inspect.signature(function)}", f"Rename its parameters{named}"
        raise ConfigError(Problem("signature", f"{key}.function", path, expected, why, remedy))
    # TRL's functions may ask for any column.
    columns = filter(_is_required, inspect.signature(function).parameters.values())
    row = ("", "", {"answer": ""} | {column.name: "" for column in columns}, list[int]())
    inputs = inputs_of(function, accepted, [row], args)
    check_arguments(key, path, function, args, inputs, CALLS[accepted])
    return accepted


def _is_required(parameter: inspect.Parameter) -> bool:
    named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    return named and parameter.default is parameter.empty


def check_arguments(
    key: str,
    path: str,
    function: Callable[..., Any],
    args: dict[str, Any],
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    call: str,
) -> None:
    """Raise a ConfigError unless a function takes these inputs: positional, and args by keyword."""
    signature, (positional, keywords) = inspect.signature(function), inputs
    try:
        signature.bind(*positional, **keywords)
    except TypeError as error:
        known = list(signature.parameters)[len(positional) :]
        required = [name for name in known if _is_required(signature.parameters[name])]
        missing = [f"+{key}.args.{name}=<value>" for name in required if name not in keywords]
        remedy = f"Add {' '.join(missing)}" if missing and not {*keywords} - {*known} else ""
        why = f"it cannot be called with {key}.args = {args}: {error}"
        similar = f"Its signature is {signature}; the call is {call}. "
        similar += _similar_args(key, args, known)
        remedy = f"{similar}{remedy or f'Remove or rename keys of {key}.args'}"
        problem = Problem("arguments", f"{key}.function", path, why=why, remedy=remedy)
        raise ConfigError(problem) from error


def _similar_args(key: str, args: dict[str, Any], known: list[str]) -> str:
    """Return "Did you mean ...? " for args that are no parameters; empty without similar ones."""
    unknown = [name for name in args if name not in known]
    similar = [one for name in unknown for one in similar_siblings(f"{key}.args.{name}", known)]
    return f"Did you mean {' or '.join(similar)}? " if similar else ""
