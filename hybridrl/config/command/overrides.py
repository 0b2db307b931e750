"""All problems of a command line's overrides in one report, and the config of the usable ones.

Hydra stops at the first unusable override. Here each is checked by itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.types import TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from hybridrl.config.command.command_line import CONFIG_NAME, DIRECTORIES, CommandLine
from hybridrl.config.command.input_errors import INPUT_ERRORS, problem_of, reason_of
from hybridrl.config.command.own_functions import Loader, drop_inherited, override_leaves
from hybridrl.config.command.provenance import hidden_choices, recipe_files
from hybridrl.config.errors import ABSENT, Problem, as_problem, shown
from hybridrl.config.keys import ADDED_GROUPS, did_you_mean, leaves, other_names, raw_tree
from hybridrl.config.planner.machine import Machine
from hybridrl.config.schema_keys import is_read, known_keys, shared_by
from hybridrl.config.user_code.classes import OPTIONAL, role_classes

# Hydra's name of a run, which names its log.
JOB = "main"
# Groups whose further choices come with packages.
PLUGGED_IN = ("hydra/sweeper", "hydra/launcher")
# The sweeper that tries every combination; it knows no intervals.
BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"

# Changes a config composed of groups before values are set in it; gets the chosen groups.
Underlay = Callable[[DictConfig, Sequence[str]], None]


def names_hardware(overrides: Sequence[str]) -> bool:
    """Return whether an override chooses the group `hardware`."""
    return any(override.split("=")[0].lstrip("+~") == "hardware" for override in overrides)


def quoted(text: str) -> str:
    """Return `text` quoted for Hydra's grammar."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


class Precomposed(NamedTuple):
    """Result of composing a config before Hydra runs.

    Attributes:
        problems: of unusable overrides.
        cfg: composed from the usable ones; of a sweep, its first job. None if that failed.
        overrides: the usable ones.
        hydra: the section `hydra`, which `cfg` lacks.
        machine: returns the one that `hardware` is for; None if nothing has looked for it.
    """

    problems: list[Problem]
    cfg: DictConfig | None
    overrides: list[str]
    hydra: DictConfig | None = None
    machine: Callable[[], Machine] | None = None


def precompose(
    line: CommandLine, config_dir: Path, underlay: Underlay | None = None
) -> Precomposed:
    """Check every override and compose the usable ones.

    `underlay` changes the config between groups and overrides of values.
    """
    problems = list(line.problems)
    with initialize_config_dir(str(config_dir), job_name=JOB, version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        parsed = _parsed(line.overrides, loader, problems)
        composer = _Composer(loader, _search_path(line, parsed), config_dir, line.args.config_dir)
        usable = _usable(parsed, lambda o: composer.problem(o, line.sweeps), problems)
        groups = [o for o in usable if composer.is_group(o) or o.is_hydra_override()]
        cfg = composer.compose(groups, problems)
        if cfg is None:
            return Precomposed(problems, None, [])
        with open_dict(cfg):
            hydra = cfg.pop("hydra")
        runtime = hydra.runtime
        problems += hidden_choices(usable, recipe_files(runtime.choices, runtime.config_sources))
        if not any(o.key_or_group == "hydra/sweeper" for o in parsed):
            usable = _usable(usable, lambda o: _interval_problem(o, hydra), problems)
        if underlay is not None:
            underlay(cfg, [o.key_or_group for o in groups])
        base = cfg
        for o in usable:  # workers come first, as they may have keys of their own
            key, value = o.key_or_group, o.value()
            if key.endswith(".worker") and isinstance(value, str) and OmegaConf.select(base, key):
                OmegaConf.update(base, key, value)
        known = _usable(usable, lambda o: None if o in groups else _key_problem(o, base), problems)
        # A section that is not there has one kind of problem, not those of its other keys.
        absent = {_section(o) for o in usable if o not in known} - set(base)
        usable = [o for o in known if _section(o) not in absent]
        values = [_first_job(o) for o in usable if o not in groups]
        to_apply = OverridesParser.create().parse_overrides(values)
        inherited, whole = leaves(raw_tree(cfg)), cfg
        if _usable(to_apply, lambda o: _apply(o, whole), problems) == to_apply:
            drop_inherited(cfg, [inherited, override_leaves(values)])
        else:
            cfg = None
    _name_overrides(hydra, usable)
    return Precomposed(problems, cfg, [str(o.input_line) for o in usable], hydra)


def run_composed(cfg: DictConfig, config_dir: Path, task: TaskFunction) -> None:
    """Run Hydra's task with a whole config as hydra.main does, which would compose it twice."""
    with initialize_config_dir(str(config_dir), job_name=JOB, version_base="1.3"):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None and isinstance(hydra.config_loader, Loader)
        hydra.config_loader.composed = cfg
        hydra.run(CONFIG_NAME, task, overrides=[])


def _name_overrides(hydra: DictConfig, overrides: Sequence[Override]) -> None:
    """Set in Hydra's section, which is composed of groups, all that it says of the overrides."""
    ours = [o for o in overrides if not o.is_hydra_override()]
    hydra.overrides.task = [o.input_line for o in ours]
    hydra.overrides.hydra = [o.input_line for o in overrides if o.is_hydra_override()]
    dirname = hydra.job.config.override_dirname
    hydra.job.override_dirname = get_overrides_dirname(ours, **dirname)


def _apply(override: Override, cfg: DictConfig) -> Problem | None:
    """Apply an override of a value to a config; return the problem if that cannot be done."""
    try:
        ConfigLoaderImpl._apply_overrides_to_config([override], cfg)
    except INPUT_ERRORS as error:
        return Problem("not_applied", str(override.input_line), why=problem_of(error))
    return None


def _section(override: Override) -> str:
    return str(override.key_or_group).partition(".")[0]


def _usable(
    overrides: Sequence[Override],
    problem_of_one: Callable[[Override], Problem | None],
    problems: list[Problem],
) -> list[Override]:
    """Return the overrides without a problem; add the problems of others."""
    of_each = [problem_of_one(override) for override in overrides]
    problems += filter(None, of_each)
    return [override for override, problem in zip(overrides, of_each, strict=True) if not problem]


def _parsed(
    overrides: Sequence[str], loader: ConfigLoader, problems: list[Problem]
) -> list[Override]:
    parser = OverridesParser.create()
    parsed = []
    for text in overrides:
        try:
            # A glob needs the loader.
            override = replace(parser.parse_override(text), config_loader=loader)
            reason = _reason_against(override)
        except INPUT_ERRORS as error:
            reason = reason_of(error).splitlines()[0]
        if not reason:
            parsed.append(override)
            continue
        remedy = "Type key=value, and quote values with special characters: \"key='a, b'\""
        why = f"not an override ({reason})"
        problems.append(Problem("override", shown(text), why=why, remedy=remedy))
    return parsed


def _reason_against(override: Override) -> str:
    """Return the reason why a parsed override is unusable; empty if it is usable."""
    if not override.key_or_group:
        return "it has no key"
    if override.is_discrete_sweep() and not _values(override):
        return "it has no value"
    paths = override.value() if override.get_key_element() == "hydra.searchpath" else []
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        return "expected a list of folders"
    return ""


def _search_path(line: CommandLine, parsed: Sequence[Override]) -> list[str]:
    """Return an override of hydra.searchpath with --config-dir, which compose() lacks."""
    given = [o.value() for o in parsed if o.get_key_element() == "hydra.searchpath"]
    paths = [str(path) for path in given[0]] if given and isinstance(given[0], list) else []
    if line.args.config_dir is not None:
        paths.insert(0, f"file://{Path(line.args.config_dir).resolve()}")
    return [f"hydra.searchpath=[{','.join(map(quoted, paths))}]"] if paths else []


@dataclass(frozen=True)
class _Composer:
    """Composer of groups and overrides, by Hydra; `search_path` adds the user's folders.

    `builtin` is hybridrl's folder, `own` that of --config-dir.
    """

    loader: ConfigLoader
    search_path: list[str]
    builtin: Path
    own: str | None

    def options(self, group: str) -> list[str]:
        """Return the choices of a group; none if there is no such group."""
        return self.loader.get_group_options(
            group, config_name=CONFIG_NAME, overrides=self.search_path
        )

    def is_group(self, override: Override) -> bool:
        """Return whether an override chooses from a group."""
        return "." not in override.key_or_group and bool(self.options(override.key_or_group))

    def hidden(self, group: str, choice: Any) -> Path | None:
        """Return the user's file of a choice that hybridrl has, too; Hydra would not read it."""
        file = Path(group, f"{choice}.yaml")
        if self.own is None or not (self.builtin / file).is_file():
            return None
        return own if (own := Path(self.own) / file).is_file() else None

    def problem(self, override: Override, sweep: bool) -> Problem | None:
        """Return the problem of an override that shows without composing."""
        text = str(override.input_line)
        if override.is_sweep_override() and not sweep:
            remedy = f"For one list, type {override.key_or_group}=[a,b]; quote a text"
            return Problem("sweep", text, why="several values need --multirun (-m)", remedy=remedy)
        if override.key_or_group in DIRECTORIES and override.value() in ("", None):
            remedy = f"Type {override.key_or_group}=<directory>"
            return Problem("directory", text, ABSENT, "a directory", "", remedy)
        if not self.is_group(override) or override.is_delete():
            return None
        group, options = override.key_or_group, self.options(override.key_or_group)
        if group in ADDED_GROUPS and not override.is_add():
            why = f"{group} is not in the defaults list"
            return Problem("added_group", text, why=why, remedy=f"Type +{text}")
        if group not in ADDED_GROUPS and override.is_add() and (self.builtin / group).is_dir():
            why, remedy = f"{group} has a choice already", f"Type {group}={override.value()}"
            return Problem("chosen_group", text, why=why, remedy=remedy)
        for value in _values(override):
            if file := self.hidden(group, value):
                why = f"hybridrl has a {group} of this name, which hides {file}"
                return Problem("hidden_file", text, why=why, remedy="Give your file another name")
            if isinstance(value, str) and value not in options:
                return _unknown_choice(text, group, value, options)
        return None

    def compose(self, overrides: Sequence[Override], problems: list[Problem]) -> DictConfig | None:
        """Compose a sweep's first job, or the run; None, with the problem added, if that fails."""
        lines = [_first_job(o) for o in overrides if o.get_key_element() != "hydra.searchpath"]
        try:
            return compose(CONFIG_NAME, [*lines, *self.search_path], return_hydra_config=True)
        except INPUT_ERRORS as error:
            text = f"{self._choice_with(error, overrides)}{problem_of(error)}"
            problems.append(as_problem(text))
            return None

    def _choice_with(self, error: BaseException, overrides: Sequence[Override]) -> str:
        """Return the group's choice that raises the error alone: Python's errors name no file."""
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


def _values(override: Override) -> list[Any]:
    """Return the values of an override, several of a sweep."""
    if not override.is_sweep_override():
        return [override.value()]
    return [text.strip("'\"") for text in override.sweep_string_iterator()]


def _first_job(override: Override) -> str:
    """Return the override of a sweep's first job; of an interval, its start."""
    if not override.is_sweep_override():
        return str(override.input_line)
    value = override.value()
    if isinstance(value, IntervalSweep):
        return f"{override.get_key_element()}={value.start}"
    return f"{override.get_key_element()}={next(iter(override.sweep_string_iterator()))}"


def _interval_problem(override: Override, hydra: DictConfig) -> Problem | None:
    """Return the problem of an interval without a sweeper that draws from it."""
    if not override.is_interval_sweep() or hydra.sweeper.get("_target_") != BASIC_SWEEPER:
        return None
    why = "Hydra's basic sweeper tries lists of values, not intervals"
    remedy = "Type hydra/sweeper=optuna (pip install 'hybridrl[sweeps]'), or list the values"
    return Problem("interval", str(override.input_line), why=why, remedy=remedy)


def _key_problem(override: Override, base: DictConfig) -> Problem | None:
    """Return the problem of an override's key, from the config without overrides of values."""
    if override.is_add() or override.is_force_add() or override.is_delete():
        return None
    key, text = override.key_or_group.replace("[", ".").replace("]", ""), str(override.input_line)
    if (shared := shared_by(key)) is not None:
        name, note = shared
        target = key.replace(name, note.key, 1)
        is_link = note.is_linked and text.partition("=")[2].strip("'\"") == f"${{{note.key}}}"
        if is_read(target) and not (is_link and key == name):
            why = f"{name} is no key: roles share {note.key} without copies, as {note.why}"
            return Problem("copy", text, why=why, remedy=f"Set {target}={text.partition('=')[2]}")
    for leaf, value in leaves(raw_tree(base)).items():
        rest = key.removeprefix(f"{leaf}.")
        if f"{leaf}.".startswith(f"{key}.") or (rest != key and isinstance(value, list)):
            return None
    return _unknown_key(override.key_or_group, text, base)


def _unknown_key(key: str, text: str, base: DictConfig) -> Problem:
    """Return the problem of a key that is not in conf/; a user's worker may have it."""
    classes, _ = role_classes(base)  # their problems are reported when the config is checked
    known = known_keys(base, classes)
    section = key.partition(".")[0]
    is_theirs = any(key == other.key for other in other_names())
    choices = {"environment": "environment=custom", "agent": "environment=agent"}
    if (
        section in ("lora", "agent", "environment", *OPTIONAL)
        and section not in base
        and not (is_theirs and section != "agent")
    ):
        why, remedy = f"there is no {section}, so nothing reads it", f"{section}=default"
        return Problem("no_section", text, why=why, remedy=f"Set {choices.get(section, remedy)}")
    if key in known:
        why = f"the worker reads {key}, but no file sets it"
        return Problem("new_key", text, why=why, remedy=f"Type +{text}")
    guess = did_you_mean(key, [*ADDED_GROUPS, *known])
    if ".args." in key or ".chat_template_kwargs." in key:
        near = f"{guess} " if guess.startswith("Did you") else ""
        remedy = f"{near}For a new one type +{text}"
        return Problem("new_argument", text, why="no file sets this argument", remedy=remedy)
    return Problem("unknown_key", text, why="unknown key, nothing reads it", remedy=guess)


def _unknown_choice(text: str, group: str, value: str, options: Sequence[str]) -> Problem:
    guess = did_you_mean(value, options) if options else ""
    remedies = [guess] if guess.startswith("Did you") else []
    if group in ADDED_GROUPS:
        remedies.append(f"Your own: in ./{group}/, or in DIR/{group}/ with --config-dir=DIR.")
    if group in PLUGGED_IN:
        remedies = ["Optuna, joblib and submitit: pip install 'hybridrl[sweeps]'"]
    expected = f"one of {', '.join(options)}"
    why = f"{group} has no {value}"
    return Problem("choice", text, ABSENT, expected, why, "\n".join(remedies))
