"""What a config of unknown origin would run or send, at the cost of whoever uses the config."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hybridrl.config.errors import ConfigError
from hybridrl.config.user_code.classes import BUILT_IN

# Keys whose texts are dotted paths, by their last word; and one that is a name or a path.
NAMES_CODE = ("function", "worker")
ESTIMATOR = "algorithm.advantage"
# What a config may name unasked. Not all that can be imported from hybridrl: io.FileIO can, too.
OURS = frozenset(
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
# Sections whose `args` go to a process that sees the environment variables named there.
JUDGES = ("reward", "environment", "eval")
# How keys end that name an environment variable.
OF_VARIABLE = "_env"


def foreign_code(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The dotted paths in a config to other than hybridrl's rewards and the like: key and path."""
    for key, value in _texts(config):
        is_path = key.rpartition(".")[2] in NAMES_CODE or key == ESTIMATOR
        if is_path and "." in value and value not in OURS:
            yield key, value


def outward(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Arguments of rewards and environments that are a URL or name an environment variable."""
    for key, value in _texts(config):
        section, *parts = key.split(".")
        is_argument = section in JUDGES and "args" in parts
        names_variable = value in os.environ or key.endswith(OF_VARIABLE)
        if is_argument and ("://" in value or names_variable):
            yield key, value


def unconfined(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Arguments of rewards that switch the sandbox of a model's programs off."""
    for key, value in _texts(config):
        if key.split(".")[0] in JUDGES and key.endswith(".args.isolation") and value == "none":
            yield key, value


def refuse_foreign_code(
    config: Mapping[str, Any],
    origin: str,
    overrides: Sequence[str] = (),
    *,
    runs_judges: bool = False,
) -> None:
    """Let only rewards and the like of hybridrl be run, and what the command line itself names.

    Args:
        config: plain or resolved, as far as it is used.
        origin: where it comes from, for the text.
        overrides: of the command line.
        runs_judges: whether its rewards and environments are run; then they may neither call a
            URL, see a secret nor run programs without a sandbox, unless the command line gives
            these very arguments.

    Raises:
        ConfigError: the config names other code, or arguments of that kind.
    """
    problems = []
    if code := _not_given(foreign_code(config), overrides):
        problems.append(
            f"{origin} names code that is no reward or the like of hybridrl: {', '.join(code)}.\n"
            f"It would be imported and run, with your rights.\n"
            f"If you trust whoever made it, add --run-code."
        )
    if runs_judges and (sent := _not_given(outward(config), overrides)):
        problems.append(
            f"{origin} names URLs or environment variables: {', '.join(sent)}.\n"
            f"Responses, and what the variables hold, could be sent to whoever made it.\n"
            f"Give these keys yourself, each as key=value; or, if you trust them, add --run-code."
        )
    if runs_judges and (switched_off := _not_given(unconfined(config), overrides)):
        problems.append(
            f"{origin} runs a model's programs without a sandbox: {', '.join(switched_off)}.\n"
            f"They would have all your rights.\n"
            f"Give these keys yourself, each as key=value; or, if you trust them, add --run-code."
        )
    if problems:
        raise ConfigError(*problems)


def _not_given(found: Iterator[tuple[str, str]], overrides: Sequence[str]) -> list[str]:
    """Those of the keys that no override sets or removes, with what they hold."""
    return [
        f"{key} = {value}"
        for key, value in found
        if not any(_takes_the_place(override, key) for override in overrides)
    ]


def _takes_the_place(override: str, key: str) -> bool:
    """Whether nothing of `key` is left; a mapping as a value leaves what it does not name."""
    name, _, value = override.partition("=")
    name = name.lstrip("+")
    if name.startswith("~"):
        return key == name[1:] or key.startswith(f"{name[1:]}.")
    is_group = "." not in name and not value.lstrip().startswith("{")
    return key == name or (is_group and key.startswith(f"{name}."))


def _texts(tree: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every text in nested mappings and lists by its dotted key."""
    if isinstance(tree, Mapping | list | tuple):
        items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        for name, item in items:
            yield from _texts(item, f"{key}.{name}" if key else str(name))
    elif isinstance(tree, str):
        yield key, tree
