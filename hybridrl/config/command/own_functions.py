"""Own functions: they do not inherit the args of the function that they replace.

Hydra merges sections, so `reward.function=my_module.my_reward` would keep the args of
conf/reward/gsm8k.yaml. The rule: if a recipe or the command line replaces a section's function by
another dotted path, or by a list, what earlier sources set in `args` is dropped. With a reward, the
rules of eval.rules that use the replaced function go, too; with an environment, its stop texts. A
function that gives the data without answers drops all inherited rules.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import hydra._internal.hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from hybridrl.config.command.provenance import group_file, recipe_files
from hybridrl.config.keys import leaves, raw_tree

# Groups whose choices may set sections of other names.
WHOLE = {"environment": ("agent",)}
# Values by dotted key that one source sets.
Layer = Mapping[str, Any]


class Loader(ConfigLoaderImpl):
    """Hydra's loader with this rule: of runs, jobs of sweeps, `--cfg job` and compose().

    `composed` is a run's config that needs no composing; empty if it does.
    """

    composed = DictConfig({})

    def load_configuration(self, *args: Any, **kwargs: Any) -> DictConfig:
        """Compose as Hydra does, then drop inherited args."""
        if self.composed:
            return self.composed
        cfg = super().load_configuration(*args, **kwargs)
        runtime, overrides = cfg.hydra.runtime, cfg.hydra.overrides.task
        recipes = recipe_files(runtime.choices, runtime.config_sources)
        layers = [leaves(raw_tree(recipe)) for recipe in recipes]
        layers.append(override_leaves(OmegaConf.to_container(overrides, resolve=False)))
        drop_inherited(cfg, [_defaults(runtime, _functions(layers)), *layers])
        return cfg


# Hydra's callbacks come after it has written the config, and --cfg has none. A sweep's other
# processes unpickle the loader by its class.
hydra._internal.hydra.ConfigLoaderImpl = Loader  # type: ignore[misc]


def override_leaves(overrides: Any) -> dict[str, Any]:
    """Return the values that overrides of one job set; deletions and sweeps set none."""
    values: dict[str, Any] = {}
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if not override.is_delete() and not override.is_sweep_override():
            key = override.key_or_group.replace("[", ".").replace("]", "")
            values |= leaves({key: override.value()})
    return values


def drop_inherited(cfg: DictConfig, layers: Sequence[Layer]) -> None:
    """Drop from a composed config what own functions would inherit.

    `layers` are the sources in order, the first one that of the defaults.
    """
    for section, replaced in _replaced(layers).items():
        node = OmegaConf.select(cfg, section, throw_on_resolution_failure=False)
        if not isinstance(node, DictConfig):
            continue
        own = _own(layers[replaced:])
        args: Any = raw_tree(node).get("args")
        inherited = leaves(args) if isinstance(args, Mapping) else {}
        if inherited:
            _set(cfg, f"{section}.args", _kept(args, f"{section}.args", own))
        if section == "environment" and f"{section}.stop" not in own:
            _set(cfg, f"{section}.stop", [])
        if section == "reward":
            key = f"{section}.function"
            old = [layer[key] for layer in layers[:replaced] if key in layer]
            old += [inherited[name] for name in _functions([inherited])]
            _drop_rules(cfg, old, own)
    data = OmegaConf.select(cfg, "data", throw_on_resolution_failure=False)
    if isinstance(data, DictConfig) and data.get("function") and data.get("answer_key") is None:
        rules = raw_tree(cfg.eval).get("rules") or {}
        _drop_rules(cfg, [rule.get("function") for rule in rules.values()], _own(layers[1:]))


def _own(layers: Sequence[Layer]) -> set[str]:
    return {key for layer in layers for key in layer}


def _functions(layers: Sequence[Layer]) -> list[str]:
    """Return the keys that name functions; those of sections before those inside of them."""
    return sorted({key for layer in layers for key in layer if key.endswith(".function")})


def _replaced(layers: Sequence[Layer]) -> dict[str, int]:
    """Return each section whose function is replaced by an own one -> the last layer that does."""
    positions: dict[str, int] = {}
    for key in _functions(layers):
        before = None
        for number, layer in enumerate(layers):
            function = layer.get(key)
            if not isinstance(function, str | list) or function == before:
                continue
            is_own = isinstance(function, list) or "." in function
            if before is not None and is_own:
                positions[key.removesuffix(".function")] = number
            before = function
    return positions


def _kept(tree: Mapping[Any, Any], section: str, own: set[str]) -> dict[Any, Any]:
    """Return the part of a tree whose leaves are among `own` keys."""
    merged: dict[Any, Any] = {}
    for name, value in tree.items():
        key = f"{section}.{name}"
        if isinstance(value, Mapping) and value:
            if inner := _kept(value, key, own):
                merged[name] = inner
        elif key in own:
            merged[name] = value
    return merged


def _drop_rules(cfg: DictConfig, functions: Sequence[Any], own: set[str]) -> None:
    """Drop the inherited rules of eval.rules that use one of the `functions`."""
    rules = OmegaConf.select(cfg, "eval.rules", throw_on_resolution_failure=False)
    if not isinstance(rules, DictConfig):
        return
    kept = {
        name: rule
        for name, rule in raw_tree(rules).items()
        if not isinstance(rule, Mapping)
        or rule.get("function") not in functions
        or any(key.startswith(f"eval.rules.{name}.") for key in own)
    }
    _set(cfg, "eval.rules", kept)


def _set(cfg: DictConfig, key: str, value: Any) -> None:
    OmegaConf.update(cfg, key, value, merge=False, force_add=True)


def _defaults(runtime: Any, keys: Sequence[str]) -> Layer:
    """Return the values in the files of the chosen groups that have one of the keys."""
    values: dict[str, Any] = {}
    for group, choice in runtime.choices.items():
        section = group.replace("/", ".")
        sections = (f"{section}.", *(f"{other}." for other in WHOLE.get(group, ())))
        if isinstance(choice, str) and any(key.startswith(sections) for key in keys):
            file = group_file(group, choice, runtime.config_sources)
            tree = {} if file is None else raw_tree(file)
            is_whole = any(name in WHOLE.get(group, ()) for name in tree)
            values |= leaves(tree if is_whole else {section: tree})
    return values
