"""Trust of a config of unknown origin: code it would run, URLs, secrets and missing sandboxes."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hybridrl.config.errors import ConfigError
from hybridrl.config.user_code.classes import BUILT_IN
from hybridrl.config.user_code.files import names_code

# Allowed without trust. Not everything importable from hybridrl: io.FileIO is, too.
ALLOWED = frozenset(
    {
        "hybridrl.environments.calculator.Calculator",
        "hybridrl.environments.calculator_agent.run",
        "hybridrl.rewards.code.score",
        "hybridrl.rewards.format.gsm8k_answer",
        "hybridrl.rewards.format.matches",
        "hybridrl.rewards.gsm8k.score",
        "hybridrl.rewards.http.score",
        "hybridrl.rewards.judge.score",
        "hybridrl.rewards.math_answer.score",
        "hybridrl.rewards.none.score",
        "hybridrl.rewards.weighted.score",
        *(worker for worker, _ in BUILT_IN.values()),
    }
)
# Sections whose `args` go to a process that can read the environment.
SCORING = ("reward.", "environment.", "agent.", "eval.")
# Suffix of keys that name an environment variable.
VARIABLE_SUFFIX = "_env"


def _names_code(key: str, value: str) -> bool:
    is_foreign = names_code(key) and "." in value and value not in ALLOWED
    return is_foreign or (key == "model.trust_remote_code" and value == "True")


def _reaches_out(key: str, value: str) -> bool:
    names_variable = value in os.environ or key.endswith(VARIABLE_SUFFIX)
    return key.startswith(SCORING) and ".args" in key and ("://" in value or names_variable)


def _has_no_sandbox(key: str, value: str) -> bool:
    return key.startswith(SCORING) and key.endswith(".args.isolation") and value == "none"


# Judgements of a key and its value, with their messages; the first alone if no reward runs.
_KINDS = (
    (_names_code, "names code outside hybridrl", "It would run with your rights."),
    (
        _reaches_out,
        "names URLs or environment variables",
        "Responses, and the values of these variables, could be sent to its author.",
    ),
    (
        _has_no_sandbox,
        "runs model-written programs without a sandbox",
        "They would run with your rights.",
    ),
)


def untrusted_code(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield key and path of code that is not allowed without trust."""
    return ((key, value) for key, value in _texts(config) if _names_code(key, value))


def needs_trust(config: Mapping[str, Any]) -> bool:
    """Return whether an evaluation with this config is refused without --run-code."""
    return any(refused(*text) for text in _texts(config) for refused, _, _ in _KINDS)


def refuse_untrusted_code(
    config: Mapping[str, Any],
    origin: str,
    overrides: Sequence[str] | None = None,
    *,
    runs_rewards: bool = False,
) -> None:
    """Refuse a config that names other code than hybridrl's, unless the command line names it.

    Args:
        config: as plain data, the sections that are used.
        origin: its source, for the message.
        overrides: of the command line; None: it takes none.
        runs_rewards: true if its rewards and environments run. Then URLs, names of environment
            variables and missing sandboxes are refused too, unless set on the command line.

    Raises:
        ConfigError: the config needs trust.
    """
    own = [
        (key, value)
        for key, value in _texts(config)
        if not any(_replaces(override, key) for override in overrides or ())
    ]
    advice = "If you trust its author, add --run-code."
    if overrides is not None:
        advice = f"Set these keys on the command line (key=value). {advice}"
    problems = [
        f"{origin} {what}: {', '.join(refused)}.\n{why}\n{advice}"
        for is_refused, what, why in _KINDS[: None if runs_rewards else 1]
        if (refused := [f"{key} = {value}" for key, value in own if is_refused(key, value)])
    ]
    if problems:
        raise ConfigError(*problems)


def _replaces(override: str, key: str) -> bool:
    """Return whether an override replaces `key`; a mapping keeps the keys that it does not name."""
    name, _, value = override.partition("=")
    name = name.lstrip("+")
    if name.startswith("~"):
        return key == name[1:] or key.startswith(f"{name[1:]}.")
    is_group = "." not in name and not value.lstrip().startswith("{")
    return key == name or (is_group and key.startswith(f"{name}."))


def _texts(tree: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted key and value of every text and flag in nested mappings and lists."""
    if isinstance(tree, Mapping | list | tuple):
        items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        for name, item in items:
            yield from _texts(item, f"{key}.{name}" if key else str(name))
    elif isinstance(tree, str | bool):
        yield key, str(tree)
