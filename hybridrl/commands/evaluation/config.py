"""Config of an evaluation: the run's config or the defaults, then the overrides.

Data, reward, limits and seed come from the run; hardware, nodes and sharding from this machine.
Overrides replace both.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from hybridrl.app.compose import composed, stored_weight_problems
from hybridrl.checkpoint.find import Found
from hybridrl.commands.evaluation.options import Subject
from hybridrl.config.choices import Init
from hybridrl.config.command.command_line import CommandLine
from hybridrl.config.command.provenance import provenance_of
from hybridrl.config.errors import ConfigError
from hybridrl.config.keys import leaves
from hybridrl.config.links import LINKS
from hybridrl.config.load import Examined, examine
from hybridrl.config.planner.machine import Machine
from hybridrl.config.user_code.untrusted_code import refuse_untrusted_code
from hybridrl.models.resolve import read_model_config
from hybridrl.trainer.tracking.provenance import HIDDEN

# Sections from the run.
OF_RUN = ("seed", "model", "lora", "data", "reward", "environment", "agent", "eval", "rollout")
# Those of them that sampling alone needs.
OF_SAMPLING = ("seed", "model", "lora", "data", "rollout")
# Keys of rollout that are not from the run if it had another device.
OF_DEVICE = (
    "dtype",
    "enforce_eager",
    "gpu_memory_utilization",
    "kv_cache_mb",
    "max_num_seqs",
    "sleep",
)
# Sections and further keys that an evaluation reads.
SECTIONS = (
    "seed",
    "hardware",
    "model",
    "data",
    "fsdp",
    "cluster",
    "placement",
    "rollout",
    "reward",
    "environment",
    "agent",
)
READ = (*SECTIONS, "run.name", "eval.rules", "eval.top_k")
# Keys that a flag replaces.
FLAGS = {
    "rollout.responses_per_prompt": "--samples N",
    "eval.greedy": "--greedy",
    "eval.samples": "--samples N",
    "hydra.run.dir": "--output DIR",
}


def evaluation_config(
    line: CommandLine,
    subject: Subject,
    machine: Machine,
    *,
    runs_code: bool,
    sections: Sequence[str] = OF_RUN,
) -> Examined:
    """Return the examined config of an evaluation; ConfigError with every problem.

    With `runs_code` the checkpoint's config is trusted: its user code may run, and its rewards may
    use URLs and environment variables. `sections` are those that come from the run.
    """
    problems = list(idle_problems(line.overrides, subject))
    if problems:
        raise ConfigError(*problems)
    if subject.checkpoint is not None:
        _refuse_unresolved(subject.checkpoint)
    found = composed(line, lambda: machine, partial(underlay, subject, sections=sections))
    if found.problems or found.cfg is None:
        raise ConfigError(*found.problems)
    if subject.checkpoint is not None and not runs_code:
        origin = str(subject.checkpoint.folder)
        own = {name: part for name, part in _own(subject.checkpoint).items() if name in sections}
        refuse_untrusted_code(own, origin, line.overrides, runs_rewards=True)
    result = examine(
        found.cfg,
        machine=machine,
        read_model=read_model_config,
        provenance=provenance_of(found.overrides, []),
        trains=False,
    )
    weights = () if subject.checkpoint else stored_weight_problems(result, on_hub=False)
    for problem in (*_hidden_problems(found.cfg), *weights):
        result.report.add(problem)
    if result.report.problems:
        raise ConfigError(*result.report.problems)
    return result


def _own(checkpoint: Found) -> dict[str, Any]:
    """Return the parts of the run's config that an evaluation uses."""
    run = checkpoint.manifest.config
    return {"run": {"name": run["run"]["name"]}} | {
        name: run[name] for name in OF_RUN if name in run
    }


def _refuse_unresolved(checkpoint: Found) -> None:
    """Refuse ${...} in a checkpoint's config, which could read environment variables."""
    if "${" in json.dumps(_own(checkpoint)):
        raise ConfigError(
            f"{checkpoint.folder}: its config has a value with ${{...}}, expected the resolved "
            f"values that a run writes.\nUse a checkpoint written by hybridrl."
        )


def underlay(
    subject: Subject, cfg: DictConfig, groups: Sequence[str], sections: Sequence[str] = OF_RUN
) -> None:
    """Set the subject's values in a config composed of groups, except in chosen groups."""
    with open_dict(cfg):
        if subject.checkpoint is None:
            cfg.model.path = subject.model
            cfg.model.init = Init.pretrained.value
            return
        run = subject.checkpoint.manifest.config
        cfg.run.name = run["run"]["name"]
        same_device = run["hardware"]["accelerator"] == cfg.hardware.accelerator
        for section in sections:
            # The section agent is set by choices of the group environment.
            group = "environment" if section == "agent" else section
            if group not in groups:
                _copy_section(cfg, section, run, skipped=() if same_device else OF_DEVICE)


def _copy_section(
    cfg: DictConfig, section: str, run: Mapping[str, Any], skipped: Sequence[str]
) -> None:
    """Set a section to the run's values; links of roles stay links."""
    value = run.get(section)  # a run of an earlier version lacks some
    if not isinstance(value, dict) or section not in cfg or cfg[section] is None:
        cfg[section] = value
        return
    for key, item in value.items():
        is_shared = section in LINKS and key in LINKS[section]
        is_seed = key == "seed" and item == run["seed"]
        if is_shared or (is_seed and OmegaConf.is_interpolation(cfg[section], key)):
            continue
        if section != "rollout" or key not in skipped:
            cfg[section][key] = item


def idle_problems(overrides: Sequence[str], subject: Subject) -> Iterator[str]:
    """Find overrides without effect on an evaluation."""
    is_run = subject.checkpoint is not None
    for override in overrides:
        key = override.split("=")[0].lstrip("+~")
        if key in FLAGS:
            yield f"{override}: an evaluation has a flag for this key.\nType {FLAGS[key]}"
        elif key == "placement.rollout_gpus":
            yield f"{override}: in an evaluation every rank samples.\nRemove it."
        elif key == "recipe":
            if is_run:
                yield (
                    f"{override}: a checkpoint is evaluated with its run's own config.\n"
                    f"Remove the recipe, and add single changes, such as data=gsm8k"
                )
        elif not is_run and key in ("model", "model.path"):
            yield f"{override}: the model is {subject.model}, the first argument.\nRemove this."
        elif not any(_overlap(key, read) for read in READ):
            yield (
                f"{override}: has no effect on an evaluation, which reads only {', '.join(READ)}.\n"
                f"Remove it."
            )


def _overlap(key: str, other: str) -> bool:
    return key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.")


def _hidden_problems(cfg: DictConfig) -> Iterator[str]:
    """Find secrets that an evaluation needs and a checkpoint does not contain."""
    for section in OF_RUN:
        node = OmegaConf.select(cfg, section)
        tree = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
        for key, value in leaves({section: tree}).items():
            if value == HIDDEN or (isinstance(value, str) and f"//{HIDDEN}@" in value):
                yield f"{key} = {value}: checkpoints contain no secrets.\nSet {key}=<the secret>"
