"""What was typed: options and overrides apart, and everything wrong with the overrides at once.

Hydra stops at the first override it cannot use. Here each is looked at by itself, and those that
are right are composed, so that one report can hold them all.
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import get_args_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from hybridrl.config.command.input_errors import INPUT_ERRORS, problem_of, reason_of
from hybridrl.config.command.report import shown
from hybridrl.config.errors import ConfigError
from hybridrl.config.keys import ADDED_GROUPS, did_you_mean
from hybridrl.config.schema_keys import known_keys
from hybridrl.config.user_code.classes import BUILT_IN, OPTIONAL, worker_config_class

CONFIG_NAME = "config"
# Where runs and sweeps write.
DIRECTORIES = ("hydra.run.dir", "hydra.sweep.dir")

# Changes a config, composed of groups alone, before values are set in it; gets the groups chosen.
Underlay = Callable[[DictConfig, Sequence[str]], None]


@dataclass(frozen=True)
class CommandLine:
    """An argv, taken apart.

    Attributes:
        options: flags and their values, in order.
        overrides: everything else.
        args: Hydra's view of them.
    """

    options: list[str]
    overrides: list[str]
    args: Namespace

    @property
    def composes(self) -> bool:
        """Whether Hydra will compose the config, to run it or to show it."""
        a = self.args
        return not (a.hydra_help or a.shell_completion or a.experimental_rerun)

    @property
    def has_own_primary(self) -> bool:
        """Whether the user named another primary config, which answers for its own defaults."""
        return self.args.config_name is not None or self.args.config_path is not None


def parse_argv(argv: Sequence[str]) -> CommandLine:
    """Options and overrides of an argv, in whatever order they stand.

    Hydra's own call of argparse refuses overrides behind an option ("+recipe=x -m seed=1,2").
    """
    args = get_args_parser().parse_intermixed_args(list(argv))
    overrides = list(args.overrides)
    options = list(argv)
    for override in overrides:
        options.remove(override)
    return CommandLine(options, overrides, args)


def names_hardware(overrides: Sequence[str]) -> bool:
    """Whether an override picks the group `hardware`."""
    return any(override.split("=")[0].lstrip("+~") == "hardware" for override in overrides)


def quoted(text: str) -> str:
    """`text` as a value that Hydra's grammar takes literally."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


@dataclass(frozen=True)
class Precomposed:
    """What can be said of the overrides before Hydra runs.

    Attributes:
        problems: of overrides that cannot be used.
        cfg: composed from the others; of a sweep, its first job. None if that failed.
        overrides: those others.
    """

    problems: list[str]
    cfg: DictConfig | None
    overrides: list[str]


def precompose(
    line: CommandLine, config_dir: Path, underlay: Underlay | None = None
) -> Precomposed:
    """Look at every override and compose the usable ones.

    Args:
        line: the command line; with `has_own_primary` Hydra alone can judge it.
        config_dir: folder of the primary config.
        underlay: what the overrides of values are set on, instead of the groups' values alone.
    """
    problems: list[str] = []
    with initialize_config_dir(config_dir=str(config_dir), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        parsed = _parsed(line.overrides, loader, problems)
        look = _Look(loader, _search_path(line, parsed))
        sweep = line.args.multirun or "hydra.mode=MULTIRUN" in line.overrides
        usable = [o for o in parsed if _accept(look.group_problem(o, sweep), problems)]
        groups = [o for o in usable if look.is_group(o) or o.is_hydra_override()]
        base = look.compose(groups, problems)
        if base is None:
            return Precomposed(problems, None, [])
        if underlay is not None:
            underlay(base, [o.key_or_group for o in groups])
        usable = [o for o in usable if o in groups or _accept(_key_problem(o, base), problems)]
        if underlay is None:
            cfg = look.compose(usable, problems)
        else:
            cfg = _with_values(base, [o for o in usable if o not in groups], problems)
    return Precomposed(problems, cfg, [str(o.input_line) for o in usable])


def _accept(problem: str | None, problems: list[str]) -> bool:
    """Whether there is no problem; one is added to `problems`."""
    if problem is not None:
        problems.append(problem)
    return problem is None


def _parsed(overrides: Sequence[str], loader: ConfigLoader, problems: list[str]) -> list[Override]:
    parser = OverridesParser.create()
    parsed = []
    for text in overrides:
        try:
            # A glob asks the loader for names.
            override = replace(parser.parse_override(text), config_loader=loader)
            reason = _reason_against(override)
        except INPUT_ERRORS as error:
            reason = reason_of(error).splitlines()[0]
        if not reason:
            parsed.append(override)
            continue
        problems.append(
            f"{shown(text)}: not an override ({reason}).\n"
            f"Write key=value, and quote values with special characters: \"key='a, b'\"."
        )
    return parsed


def _reason_against(override: Override) -> str:
    """Why an override can be parsed and not be used; empty if it can."""
    if not override.key_or_group:
        return "it names no key"
    if override.is_discrete_sweep() and not _values(override):
        return "it gives no value"
    paths = override.value() if override.get_key_element() == "hydra.searchpath" else []
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        return "expected a list of folders"
    return ""


def _search_path(line: CommandLine, parsed: Sequence[Override]) -> list[str]:
    """hydra.searchpath with --config-dir, which Hydra's compose() has no argument for."""
    given = [o.value() for o in parsed if o.get_key_element() == "hydra.searchpath"]
    paths = [str(path) for path in given[0]] if given and isinstance(given[0], list) else []
    if line.args.config_dir is not None:
        paths.insert(0, f"file://{Path(line.args.config_dir).resolve()}")
    return [f"hydra.searchpath=[{','.join(paths)}]"] if paths else []


@dataclass(frozen=True)
class _Look:
    """Hydra's own view of groups and configs.

    Attributes:
        loader: finds groups.
        search_path: an override that adds the user's folders, or nothing.
    """

    loader: ConfigLoader
    search_path: list[str]

    def options(self, group: str) -> list[str]:
        """The choices of a group; none where there is no such group."""
        return self.loader.get_group_options(
            group, config_name=CONFIG_NAME, overrides=self.search_path
        )

    def is_group(self, override: Override) -> bool:
        """Whether an override picks from a group."""
        return "." not in override.key_or_group and bool(self.options(override.key_or_group))

    def group_problem(self, override: Override, sweep: bool) -> str | None:
        """Why an override cannot be used, as far as that shows without composing."""
        text = override.input_line
        if override.is_sweep_override() and not sweep:
            return (
                f"{text}: several values need --multirun (-m).\n"
                f"To give one list, write {override.key_or_group}=[a,b]; quote a text."
            )
        if override.key_or_group in DIRECTORIES and override.value() in ("", None):
            return f"{text}: names no directory. Write {override.key_or_group}=<directory>"
        if not self.is_group(override) or override.is_delete():
            return None
        group, options = override.key_or_group, self.options(override.key_or_group)
        in_defaults = group not in ADDED_GROUPS
        if not in_defaults and not override.is_add():
            return f"{text}: {group} is not in the defaults list. Write +{text}"
        for value in _values(override):
            if isinstance(value, str) and value not in options:
                guess = did_you_mean(value, options) if options else ""
                near = f" {guess}" if guess.startswith("Did you") else ""
                return f"{text}: {group} has no {value}; it has {', '.join(options)}.{near}"
        return None

    def compose(self, overrides: Sequence[Override], problems: list[str]) -> DictConfig | None:
        """The composed config, or None with the reason in `problems`; of a sweep the first job."""
        lines = [_first_job(o) for o in overrides if o.get_key_element() != "hydra.searchpath"]
        try:
            return compose(CONFIG_NAME, [*lines, *self.search_path])
        except INPUT_ERRORS as error:
            problems.append(f"{self._choice_with(error, overrides)}{problem_of(error)}")
            return None

    def _choice_with(self, error: BaseException, overrides: Sequence[Override]) -> str:
        """The choice of a group that has the error by itself; Python's own errors name no file."""
        for override in overrides:
            if self.is_group(override) and override.key_or_group != "hardware":
                alone = ["hardware=cpu", _first_job(override), *self.search_path]
                try:
                    compose(CONFIG_NAME, alone)
                except type(error):
                    return f"{override.input_line}: "
                except INPUT_ERRORS:
                    continue
        return ""


def _with_values(
    base: DictConfig, overrides: Sequence[Override], problems: list[str]
) -> DictConfig | None:
    """The config with values set in it as Hydra does, or None with the reason in `problems`."""
    try:
        ConfigLoaderImpl._apply_overrides_to_config(list(overrides), base)
    except INPUT_ERRORS as error:
        problems.append(problem_of(error))
        return None
    return base


def _values(override: Override) -> list[Any]:
    """The value or, of a sweep, the values of an override."""
    if not override.is_sweep_override():
        return [override.value()]
    return [text.strip("'\"") for text in override.sweep_string_iterator()]


def _first_job(override: Override) -> str:
    """The override of a sweep's first job."""
    if not override.is_sweep_override() or not override.is_discrete_sweep():
        return str(override.input_line)
    return f"{override.get_key_element()}={next(iter(override.sweep_string_iterator()))}"


def _key_problem(override: Override, base: DictConfig) -> str | None:
    """Why a key cannot be overridden, seen on the config without any value overrides."""
    key, text = override.key_or_group, str(override.input_line)
    if override.is_add() or override.is_force_add() or override.is_delete():
        return None
    tree: Any = OmegaConf.to_container(base, resolve=False)
    names = key.replace("[", ".").replace("]", "").split(".")
    for depth, name in enumerate(names):
        if isinstance(tree, str) and tree.startswith("${"):
            link, rest = ".".join(names[:depth]), ".".join(names[depth:])
            target = tree[2:-1]
            return (
                f"{text}: {link} is a link to {target}, which roles share and may not have copies "
                f"of.\nSet {target}.{rest}={text.partition('=')[2]}"
            )
        if isinstance(tree, list):
            return None
        if not isinstance(tree, dict) or name not in tree:
            return _unknown_key(key, text, base)
        tree = tree[name]
    return None


def _unknown_key(key: str, text: str, base: DictConfig) -> str:
    """The problem of a key that is in no file of conf/; a user's worker may still know it."""
    if key.partition(".")[0] == "environment" and "environment" not in base:
        return f"{text}: there is no environment, so nothing reads it. Set environment=calculator"
    classes = {}
    for role, (_, built_in) in BUILT_IN.items():
        path = OmegaConf.select(base, f"{role}.worker")
        try:
            classes[role] = worker_config_class(role, path) if path is not None else built_in
        except ConfigError:
            classes[role] = built_in  # reported with the checks of the composed config
    known = known_keys(base, classes.values())
    section = key.partition(".")[0]
    if section in ("lora", *OPTIONAL) and section not in base:
        return f"{text}: there is no {section}, so nothing reads it. Set {section}=default"
    if key in known:
        return f"{text}: the worker reads {key}, but no file sets it. Write +{text}"
    return f"{text}: unknown key, nothing reads it. {did_you_mean(key, [*ADDED_GROUPS, *known])}"
