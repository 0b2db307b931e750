"""Compositions of Hydra, kept by their choices of groups: most tests change keys alone.

Hydra builds the list of files and merges them before it applies the command line's keys, so what
it has merged is the same for the same choices. Folders outside of conf/ are read each time.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hydra._internal import config_loader_impl
from hydra._internal.config_repository import IConfigRepository
from hydra._internal.defaults_list import DefaultsList
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from hybridrl.main import conf_dir

OURS = {"hydra": "pkg://hydra.conf", "main": f"file://{conf_dir()}", "schema": "structured://"}
_lists: dict[tuple[object, ...], DefaultsList] = {}
_merged: dict[int, tuple[list[ResultDefault], DictConfig]] = {}


def keep_compositions() -> Callable[[], None]:
    """Keep what Hydra merges in this process; the function that ends it."""
    loader = config_loader_impl.ConfigLoaderImpl
    create, merge = (
        config_loader_impl.create_defaults_list,
        loader._compose_config_from_defaults_list,
    )

    def defaults_list(repo: IConfigRepository, overrides_list: list[Override], **more: Any):
        sources = {source.provider: source.full_path() for source in repo.get_sources()}
        chosen = [one for one in overrides_list if _chooses(one, repo)]
        if sources != OURS or any(one.is_sweep_override() for one in overrides_list):
            return create(repo=repo, overrides_list=overrides_list, **more)
        key = (*(one.input_line for one in chosen), *more.values())
        if key not in _lists:
            _lists[key] = create(repo=repo, overrides_list=chosen, **more)
        keys = [one for one in overrides_list if one not in chosen]
        return replace(_lists[key], config_overrides=keys)

    def merged(self: Any, defaults: list[ResultDefault], repo: IConfigRepository) -> DictConfig:
        if not any(kept.defaults is defaults for kept in _lists.values()):
            return merge(self, defaults, repo)
        if id(defaults) not in _merged:
            _merged[id(defaults)] = defaults, merge(self, defaults, repo)
        return copy.deepcopy(_merged[id(defaults)][1])

    def end() -> None:
        config_loader_impl.create_defaults_list = create
        loader._compose_config_from_defaults_list = merge

    config_loader_impl.create_defaults_list = defaults_list
    loader._compose_config_from_defaults_list = merged
    return end


def _chooses(override: Override, repo: IConfigRepository) -> bool:
    return repo.group_exists(override.key_or_group) and not isinstance(override.value(), dict)
