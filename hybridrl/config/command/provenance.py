"""Provenance of the config's values: keys set on the command line or in a recipe, and defaults."""

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, cast

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from hybridrl.config.errors import Problem
from hybridrl.config.keys import leaves, raw_tree

# Keys of which one makes a group's choice what it is.
_MAIN_KEYS = {
    "data": ("name", "train_files", "mixture", "function"),
    "environment": ("function",),
    "model": ("path",),
    "reward": ("function",),
}


class Source(IntEnum):
    """Source of a value; a later one overrides an earlier one."""

    default = 0
    recipe = 1
    command_line = 2


class Provenance(dict[str, Source]):
    """Dotted key of a leaf or section that the user set -> its source; others are defaults."""

    def source(self, key: str) -> Source:
        """Return the last source that sets `key` or a section around it."""
        parts = key.split(".")
        prefixes = [".".join(parts[: n + 1]) for n in range(len(parts))]
        return max(self.get(prefix, Source.default) for prefix in prefixes)


def provenance_of(overrides: Sequence[str], recipes: Sequence[DictConfig]) -> Provenance:
    """Return the provenance of a config from overrides as typed and YAML of chosen recipes."""
    sources = Provenance()
    for recipe in recipes:
        tree = raw_tree(recipe)
        tree.pop("defaults", None)
        sources |= dict.fromkeys(leaves(tree), Source.recipe)
    for override in overrides:
        sources[override.split("=")[0].lstrip("+~")] = Source.command_line
    return sources


def recipe_files(choices: Mapping[str, Any], config_sources: Sequence[Any]) -> list[DictConfig]:
    """Return the YAML of the chosen recipes, from choices and config_sources of hydra.runtime.

    A recipe that a chosen one names in its defaults list comes before it.
    """
    chosen = choices.get("recipe")
    names = [chosen] if isinstance(chosen, str) else list(chosen or [])
    files: list[DictConfig] = []
    for name in names:
        file = group_file("recipe", name, config_sources)
        if file is not None:
            bases = [base for base in file.get("defaults", []) if base not in (name, "_self_")]
            own = [base for base in bases if isinstance(base, str)]
            files += [*recipe_files({"recipe": own}, config_sources), file]
    return files


def hidden_choices(
    overrides: Sequence[Override], recipes: Sequence[DictConfig]
) -> Iterator[Problem]:
    """Yield a problem for each typed choice of a group whose main key a recipe sets as well."""
    typed = {override.key_or_group for override in overrides}
    trees = [leaves(raw_tree(recipe)) for recipe in recipes]
    own = [f"{key}." for tree in trees for key, value in tree.items() if value not in (None, {})]
    for override in overrides:
        group = override.key_or_group
        for key in (f"{group}.{name}" for name in _MAIN_KEYS.get(group, ())):
            if key not in typed and any(name.startswith(f"{key}.") for name in own):
                why = f"no effect: the recipe sets {key}, and keys of a recipe stand above groups"
                remedy = (
                    f"Remove it, or set {key} on the command line, or take it out of the recipe"
                )
                yield Problem("hidden_choice", str(override.input_line), why=why, remedy=remedy)
                break


def group_file(group: str, choice: str, config_sources: Sequence[Any]) -> DictConfig | None:
    """Return the YAML of a group's choice; None if no folder of the search path has it."""
    folders = [source.path for source in config_sources if source.schema == "file"]
    texts = [Path(folder, group, f"{choice}.yaml") for folder in folders]
    configs = [OmegaConf.load(text) for text in texts if text.is_file()]
    return cast(DictConfig, configs[0]) if configs else None
