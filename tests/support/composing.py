"""What these tests share: composing configs in process and examining them without a real model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from hybridrl.config.command.provenance import provenance_of, recipe_files
from hybridrl.config.errors import Problem
from hybridrl.config.load import Examined, examine
from hybridrl.config.planner.fitting import FASTEST
from hybridrl.config.planner.machine import GIB, GPU, Machine, Node
from hybridrl.main import conf_dir
from tests.support.model_shapes import QWEN, REWARD_HEAD, TINY

REPO = Path(__file__).resolve().parents[2]
LAPTOP = Machine((Node("laptop", cores=2, memory_bytes=32 * GIB),))
H200 = GPU("NVIDIA H200", 140 * GIB)
# As the user's own choice: nothing is chosen for the GPUs' memory.
FASTEST_SET = [str(change) for change in FASTEST]
GPU_NODE = Machine((Node("big", cores=64, memory_bytes=1024 * GIB, gpus=(H200,) * 8),))


def composed(overrides: Sequence[str], config_dir: Path | None = None) -> DictConfig:
    """The job's config, as Hydra hands it over."""
    more = [f"hydra.searchpath=[file://{config_dir}]"] if config_dir else []
    with initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3"):
        cfg = compose("config", [*overrides, *more], return_hydra_config=True)
    HydraConfig.instance().set_config(cfg)
    OmegaConf.set_struct(cfg, False)
    cfg.pop("hydra")
    OmegaConf.set_struct(cfg, True)
    return cfg


def examined(
    overrides: Sequence[str],
    *,
    machine: Machine = LAPTOP,
    model: dict[str, Any] | None = None,
    config_dir: Path | None = None,
) -> Examined:
    """A config examined as main does, but for the model's files and the data.

    A reward model has the config.json of the policy, with a head.
    """
    cfg = composed(overrides, config_dir)
    runtime = HydraConfig.get().runtime
    recipes = recipe_files(runtime.choices, runtime.config_sources)
    provenance = provenance_of(overrides, recipes)
    on_gpu = "hardware=gpu" in overrides
    policy = model or (QWEN if on_gpu else TINY)
    files = {OmegaConf.select(cfg, "reward_model.model.path"): policy | REWARD_HEAD}
    return examine(
        cfg,
        machine=machine,
        read_model=lambda path: files.get(path, policy),
        provenance=provenance,
    )


def problems(*overrides: str, **kwargs: Any) -> list[str]:
    """The messages of a config's problems."""
    return [str(problem) for problem in examined(overrides, **kwargs).report.problems]


def named(*overrides: str, **kwargs: Any) -> list[tuple[str, str]]:
    """Id and key of each problem of a config."""
    return [(p.id, p.key) for p in examined(overrides, **kwargs).report.problems]


def only(*overrides: str, **kwargs: Any) -> Problem:
    """The one problem of a config."""
    (problem,) = examined(overrides, **kwargs).report.problems
    return problem


class Mistake(NamedTuple):
    """Overrides, id and key of the problem that they get, and words of its message."""

    id: str
    key: str
    overrides: list[str]
    words: list[str]


def mistakes(table: str) -> list[Any]:
    """The cases of a table with lines of: id key override override | words | words."""
    cases = []
    for line in table.strip().splitlines():
        start, *words = (part.strip() for part in line.split(" | "))
        id_, key, *overrides = start.split()
        cases.append(pytest.param(Mistake(id_, key, overrides, words), id=" ".join(overrides)))
    return cases


def told(mistake: Mistake, problems: Sequence[Problem]) -> list[Mistake]:
    """Problems as cases of the mistake's overrides, with those of its words that they have."""
    return [
        Mistake(p.id, p.key, mistake.overrides, [w for w in mistake.words if w in str(p)])
        for p in problems
    ]


def made(mistake: Mistake, *base: str, **kwargs: Any) -> list[Mistake]:
    """The problems of a config with a mistake's overrides; see `told`."""
    return told(mistake, examined([*base, *mistake.overrides], **kwargs).report.problems)
