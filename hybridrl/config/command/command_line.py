"""Command lines: options and overrides of an argv."""

import re
from argparse import Namespace
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from hydra._internal.utils import get_args_parser

from hybridrl.config.errors import ConfigError, Problem
from hybridrl.config.keys import did_you_mean, named_elsewhere, other_names
from hybridrl.config.schema_keys import is_read

CONFIG_NAME = "config"
# Output directories of runs and sweeps.
DIRECTORIES = RUN_DIR, SWEEP_DIR = "hydra.run.dir", "hydra.sweep.dir"
_NUMBER = re.compile(r"-?\.?\d")


class CommandLine(NamedTuple):
    """A parsed argv.

    Attributes:
        options: flags with their values.
        overrides: all other arguments.
        args: Hydra's parse of them.
        problems: of arguments with dashes that are no options; they are in no other attribute.
    """

    options: list[str]
    overrides: list[str]
    args: Namespace
    problems: Sequence[Problem] = ()

    @property
    def composes(self) -> bool:
        """True if Hydra will compose our config, to run or to show it; not if the user's own."""
        a = self.args
        own = a.config_name is not None or a.config_path is not None
        return not (own or a.hydra_help or a.shell_completion or a.experimental_rerun)

    @property
    def starts(self) -> bool:
        """True if Hydra will start a run or a sweep of our config, not only show it."""
        return self.composes and not (self.args.cfg or self.args.info or self.args.help)

    @property
    def sweeps(self) -> bool:
        """True for a sweep."""
        return bool(self.args.multirun) or "hydra.mode=MULTIRUN" in self.overrides


def parse_argv(argv: Sequence[str]) -> CommandLine:
    """Parse options and overrides of an argv, in any order.

    Hydra's own parser refuses overrides after an option ("+recipe=x -m seed=1,2"). Recipes of the
    current directory's folder `recipe`, as `hybridrl init` writes one, are found without
    --config-dir.

    Raises:
        ConfigError: --config-dir is no folder.
    """
    _, unknown = get_args_parser().parse_known_intermixed_args(list(argv))
    argv, problems = _without_unknown(argv, unknown)
    args = get_args_parser().parse_intermixed_args(argv)
    if args.config_dir is not None and not Path(args.config_dir).is_dir():
        why = f"there is no such folder (seen from {Path.cwd()})"
        raise ConfigError(Problem("config_dir", f"--config-dir {args.config_dir}", why=why))
    if args.config_dir is None and Path("recipe").is_dir():
        line = parse_argv(["--config-dir", ".", *argv])
        return line._replace(problems=problems)
    overrides = list(args.overrides)
    options = list(argv)
    for override in overrides:
        options.remove(override)
    return CommandLine(options, overrides, args, problems)


def _without_unknown(
    argv: Sequence[str], unknown: Collection[str]
) -> tuple[list[str], list[Problem]]:
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


def _option_problem(argument: str, *values: str) -> Problem:
    key, _, value = argument.lstrip("-").partition("=")
    value = value or " ".join(values)
    remedy = did_you_mean(key, []) if named_elsewhere(key) else ""
    if is_read(key) and not any(key == other.key for other in other_names()):
        remedy = f"Type {key}={value or '<value>'}"
    why = "unknown option; settings are written key=value, without dashes"
    return Problem("option", argument, why=why, remedy=remedy)
