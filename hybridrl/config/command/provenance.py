"""Which keys somebody set by hand, and where: what tells a useless wish from an idle default."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from importlib.resources import files
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hybridrl.config.keys import leaves


class Source(IntEnum):
    """Where a value comes from; the later wins."""

    default = 0
    recipe = 1
    command_line = 2


@dataclass(frozen=True)
class Given:
    """Keys set by hand.

    Attributes:
        sources: dotted key -> where it was set. A key may be a whole section.
    """

    sources: Mapping[str, Source] = field(default_factory=dict)

    def source(self, key: str) -> Source:
        """The last place where `key`, or a section it lies in, was set."""
        parts = key.split(".")
        prefixes = [".".join(parts[: n + 1]) for n in range(len(parts))]
        return max(self.sources.get(prefix, Source.default) for prefix in prefixes)

    def under(self, prefix: str) -> list[str]:
        """The keys set by hand at or below `prefix`."""
        return sorted(k for k in self.sources if k == prefix or k.startswith(f"{prefix}."))


def given_keys(overrides: Sequence[str], recipes: Sequence[DictConfig]) -> Given:
    """What the overrides of the command line and the files of the chosen recipes set.

    Args:
        overrides: as typed: "actor.epochs=2", "+recipe=x", "~a.b".
        recipes: their YAML, as it stands in the files.
    """
    sources: dict[str, Source] = {}
    for recipe in recipes:
        tree = OmegaConf.to_container(recipe, resolve=False)
        assert isinstance(tree, dict)
        tree.pop("defaults", None)
        sources |= dict.fromkeys(leaves(tree), Source.recipe)
    for override in overrides:
        sources[override.split("=")[0].lstrip("+~")] = Source.command_line
    return Given(sources)


def recipe_files(choices: Mapping[str, Any], config_sources: Sequence[Any]) -> list[DictConfig]:
    """The YAML of the chosen recipes.

    Args:
        choices: Hydra's `hydra.runtime.choices`.
        config_sources: Hydra's `hydra.runtime.config_sources`, each with path and schema.
    """
    chosen = choices.get("recipe")
    names = [chosen] if isinstance(chosen, str) else list(chosen or [])
    found = []
    for name in names:
        for source in config_sources:
            if source.schema == "file":
                text = Path(source.path, "recipe", f"{name}.yaml")
            elif source.schema == "pkg" and source.provider != "hydra":
                package, *folders = source.path.split("/")
                text = Path(str(files(package).joinpath(*folders, "recipe", f"{name}.yaml")))
            else:
                continue
            if text.is_file():
                recipe = OmegaConf.load(text)
                assert isinstance(recipe, DictConfig)
                found.append(recipe)
                break
    return found
