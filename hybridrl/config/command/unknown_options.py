"""Arguments with dashes that are no options of Hydra, mostly another trainer's command line."""

import re
from collections.abc import Collection, Sequence

from hybridrl.config.keys import did_you_mean, named_elsewhere, other_names
from hybridrl.config.schema_keys import is_read

_NUMBER = re.compile(r"-?\.?\d")


def without_unknown(argv: Sequence[str], unknown: Collection[str]) -> tuple[list[str], list[str]]:
    """Return an argv without unknown options and the bare values behind them, and the problems."""
    kept: list[str] = []
    wrong: list[list[str]] = []
    is_value = False
    for argument in argv:
        is_number = _NUMBER.match(argument) is not None
        is_option = argument in unknown and argument.startswith("-") and not is_number
        if is_option:
            wrong.append([argument])
        elif is_value and "=" not in argument and (is_number or argument[:1] not in "-+~"):
            wrong[-1].append(argument)
            continue
        else:
            kept.append(argument)
        is_value = is_option and "=" not in argument
    return kept, [_option_problem(*words) for words in wrong]


def _option_problem(argument: str, *values: str) -> str:
    key, _, value = argument.lstrip("-").partition("=")
    value = value or " ".join(values)
    theirs = f" {did_you_mean(key, [])}" if named_elsewhere(key) else ""
    if is_read(key) and not any(key == other.key for other in other_names()):
        theirs = f" Type {key}={value or '<value>'}"
    return f"{argument}: unknown option; settings are written key=value, without dashes.{theirs}"
