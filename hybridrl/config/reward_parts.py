"""Parts of a summed reward: a list of functions becomes a weighted sum, and null parts go."""

import re

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from hybridrl.config.errors import Problem, Report
from hybridrl.config.keys import raw_tree

WEIGHTED = "hybridrl.rewards.weighted.score"
FUNCTION, PARTS = "reward.function", "reward.args.parts"


def set_parts(cfg: DictConfig, report: Report) -> None:
    """Replace a list in reward.function by the sum of its functions, and drop null parts.

    A part has the name and the signature of its function, and the weight 1. Functions of one name
    are told apart by their files or modules: a_score, b_score.
    """
    if OmegaConf.is_missing(cfg, "reward") or not isinstance(cfg.get("reward"), DictConfig):
        return
    function = OmegaConf.select(cfg, FUNCTION, throw_on_resolution_failure=False)
    paths = list(function) if isinstance(function, ListConfig) else []
    if paths and all(isinstance(path, str) for path in paths):
        _set_sum(cfg, paths, report)
    elif function == WEIGHTED:
        parts = OmegaConf.select(cfg, PARTS, throw_on_resolution_failure=False)
        if isinstance(parts, DictConfig):
            with open_dict(parts):
                for name in [name for name, part in raw_tree(parts).items() if part is None]:
                    parts.pop(name)


def _set_sum(cfg: DictConfig, paths: list[str], report: Report) -> None:
    parts = {
        name: {"function": path, "args": {}, "weight": 1.0}
        for name, path in zip(_names(paths), paths, strict=True)
    }
    if len(parts) < len(paths):
        why = "it has functions of the same name, which name the metrics reward/part_<name>"
        remedy, listed = f"Set reward=weighted, with names of yours in {PARTS}", ", ".join(paths)
        report.add(Problem("same_names", FUNCTION, f"[{listed}]", "", why, remedy), broken=FUNCTION)
    for key, value in ((FUNCTION, WEIGHTED), (PARTS, parts), ("reward.signature", "auto")):
        OmegaConf.update(cfg, key, value, merge=False, force_add=True)


def _names(paths: list[str]) -> list[str]:
    """Return the names of functions; with their files or modules if one occurs twice."""
    split = [path.replace(".py:", ".").replace("/", ".").split(".") for path in paths]
    short = [names[-1] for names in split]
    if len({*short}) == len(short):
        return short
    return [re.sub(r"\W", "_", "_".join(names[-2:])) for names in split]
