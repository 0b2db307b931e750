"""Trust of a config of unknown origin: code it would run, URLs, secrets and missing sandboxes."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hybridrl.config.errors import ConfigError
from hybridrl.config.user_code.classes import BUILT_IN

# Last word of keys with dotted paths, and a key with a name or dotted path.
NAMES_CODE = ("function", "worker")
ESTIMATOR = "algorithm.advantage"
# Allowed without trust. Not everything importable from hybridrl: io.FileIO is, too.
ALLOWED = frozenset(
    {
        "hybridrl.environments.calculator.Calculator",
        "hybridrl.rewards.code.score",
        "hybridrl.rewards.format.gsm8k_answer",
        "hybridrl.rewards.format.matches",
        "hybridrl.rewards.gsm8k.score",
        "hybridrl.rewards.http.score",
        "hybridrl.rewards.math_answer.score",
        "hybridrl.rewards.none.score",
        "hybridrl.rewards.weighted.score",
        *(worker for worker, _ in BUILT_IN.values()),
    }
)
# Sections whose `args` go to a process that can read the environment.
SCORING = ("reward", "environment", "eval")
# Suffix of keys that name an environment variable.
VARIABLE_SUFFIX = "_env"


def untrusted_code(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield key and dotted path of code that is not allowed without trust."""
    for key, value in _texts(config):
        is_path = key.rpartition(".")[2] in NAMES_CODE or key == ESTIMATOR
        if is_path and "." in value and value not in ALLOWED:
            yield key, value


def outward(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield arguments of rewards and environments with a URL or the name of a variable."""
    for key, value in _texts(config):
        section, *parts = key.split(".")
        is_argument = section in SCORING and "args" in parts
        names_variable = value in os.environ or key.endswith(VARIABLE_SUFFIX)
        if is_argument and ("://" in value or names_variable):
            yield key, value


def unconfined(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield arguments of rewards that switch off the sandbox of model-written programs."""
    for key, value in _texts(config):
        if key.split(".")[0] in SCORING and key.endswith(".args.isolation") and value == "none":
            yield key, value


def refuse_untrusted_code(
    config: Mapping[str, Any],
    origin: str,
    overrides: Sequence[str] = (),
    *,
    runs_rewards: bool = False,
) -> None:
    """Refuse a config that names other code than hybridrl's, unless the command line names it.

    Args:
        config: as plain data, the sections that are used.
        origin: its source, for the message.
        overrides: of the command line.
        runs_rewards: true if its rewards and environments run. Then URLs, names of environment
            variables and missing sandboxes are refused too, unless set on the command line.

    Raises:
        ConfigError: the config needs trust.
    """
    kinds: list[tuple[Callable[[Mapping[str, Any]], Iterator[tuple[str, str]]], str, str]] = [
        (untrusted_code, "names code outside hybridrl", "It would run with your rights."),
    ]
    if runs_rewards:
        sent = "Responses, and the values of these variables, could be sent to its author."
        free = "runs model-written programs without a sandbox"
        kinds += [
            (outward, "names URLs or environment variables", sent),
            (unconfined, free, "They would run with your rights."),
        ]
    problems = [
        f"{origin} {what}: {', '.join(found)}.\n{why}\n"
        f"Set these keys on the command line (key=value), or, if you trust its author, add "
        f"--run-code."
        for search, what, why in kinds
        if (found := _not_overridden(search(config), overrides))
    ]
    if problems:
        raise ConfigError(*problems)


def _not_overridden(found: Iterator[tuple[str, str]], overrides: Sequence[str]) -> list[str]:
    """Return "key = value" of the keys that no override sets or removes."""
    return [
        f"{key} = {value}"
        for key, value in found
        if not any(_replaces(override, key) for override in overrides)
    ]


def _replaces(override: str, key: str) -> bool:
    """Return whether an override replaces `key`; a mapping keeps the keys that it does not name."""
    name, _, value = override.partition("=")
    name = name.lstrip("+")
    if name.startswith("~"):
        return key == name[1:] or key.startswith(f"{name[1:]}.")
    is_group = "." not in name and not value.lstrip().startswith("{")
    return key == name or (is_group and key.startswith(f"{name}."))


def _texts(tree: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted key and value of every text in nested mappings and lists."""
    if isinstance(tree, Mapping | list | tuple):
        items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        for name, item in items:
            yield from _texts(item, f"{key}.{name}" if key else str(name))
    elif isinstance(tree, str):
        yield key, tree
