"""The config of an evaluation: a run's own or the composed default, then the overrides.

What is measured comes from the run (data, reward, limits, seed); where it is measured (hardware,
nodes, sharding) from the machine at hand; overrides come on top of both.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from hybridrl.app.compose import conf_dir, hardware_overrides, stored_weight_problems
from hybridrl.checkpoint.find import Found
from hybridrl.commands.evaluation.subject import Subject
from hybridrl.config.choices import Init
from hybridrl.config.command.command_line import CommandLine, names_hardware, precompose
from hybridrl.config.command.provenance import provenance_of
from hybridrl.config.errors import ConfigError
from hybridrl.config.links import LINKS
from hybridrl.config.load import Examined, examine
from hybridrl.config.planner.machine import Machine
from hybridrl.config.user_code.untrusted_code import refuse_untrusted_code
from hybridrl.config.validate import run_evaluation_checks
from hybridrl.models.resolve import read_model_config
from hybridrl.trainer.tracking.manifest import HIDDEN

# What a run says of its evaluations.
OF_RUN = ("seed", "model", "lora", "data", "reward", "environment", "eval", "rollout")
# What of it depends on the device: stays as the machine at hand has it where that is another kind.
OF_DEVICE = (
    "dtype",
    "enforce_eager",
    "gpu_memory_utilization",
    "kv_cache_mb",
    "max_num_seqs",
    "sleep",
)
# All that an evaluation reads.
READ = (
    "seed",
    "run.name",
    "hardware",
    "model",
    "data",
    "fsdp",
    "cluster",
    "placement",
    "rollout",
    "reward",
    "eval.rules",
    "environment",
)
# Keys of a run by the flags that take their place.
FLAGS = {
    "rollout.responses_per_prompt": "--samples N",
    "eval.greedy": "--greedy",
    "hydra.run.dir": "--output DIR",
}


def evaluation_config(
    line: CommandLine, subject: Subject, machine: Machine, *, runs_code: bool
) -> Examined:
    """The config of an evaluation after all checks that concern one.

    Args:
        line: the overrides.
        subject: what is evaluated.
        machine: what there is to do it on.
        runs_code: whether the subject's config is trusted: code that it names and that is not
            hybridrl's may be run, and its rewards may call URLs and see environment variables.

    Raises:
        ConfigError: every problem, in one report.
    """
    problems = list(idle_problems(line.overrides, subject))
    if problems:
        raise ConfigError(*problems)
    if not names_hardware(line.overrides):
        line.overrides.extend(hardware_overrides(machine))
    if subject.checkpoint is not None:
        _refuse_unresolved(subject.checkpoint)
    found = precompose(line, conf_dir(), partial(underlay, subject))
    if found.problems or found.cfg is None:
        raise ConfigError(*found.problems)
    if subject.checkpoint is not None and not runs_code:
        origin = str(subject.checkpoint.folder)
        refuse_untrusted_code(_own(subject.checkpoint), origin, line.overrides, runs_rewards=True)
    result = examine(
        found.cfg,
        machine=machine,
        read_model=read_model_config,
        provenance=provenance_of(found.overrides, []),
        checks=run_evaluation_checks,
    )
    weights = () if subject.checkpoint else stored_weight_problems(result, on_hub=False)
    for problem in (*_hidden_problems(found.cfg), *weights):
        result.report.add(problem)
    if result.report.problems:
        raise ConfigError(*result.report.problems)
    return result


def _own(checkpoint: Found) -> dict[str, Any]:
    """What an evaluation takes of the run's config."""
    run = checkpoint.manifest.config
    return {"run": {"name": run["run"]["name"]}} | {name: run[name] for name in OF_RUN}


def _refuse_unresolved(checkpoint: Found) -> None:
    """Let a checkpoint's config have no ${...}: some read environment variables.

    Raises:
        ConfigError: it has some.
    """
    if "${" in json.dumps(_own(checkpoint)):
        raise ConfigError(
            f"{checkpoint.folder}: its config has a value with ${{...}}, which a run resolves "
            f"before it writes checkpoints.\nEvaluate a checkpoint that hybridrl has written."
        )


def underlay(subject: Subject, cfg: DictConfig, groups: Sequence[str]) -> None:
    """Set what the subject says in a config composed of groups; groups that were chosen stay."""
    with open_dict(cfg):
        if subject.checkpoint is None:
            cfg.model.path = subject.model
            cfg.model.init = Init.pretrained.value
            return
        run = subject.checkpoint.manifest.config
        cfg.run.name = run["run"]["name"]
        same_device = run["hardware"]["accelerator"] == cfg.hardware.accelerator
        for section in OF_RUN:
            if section not in groups:
                _take(cfg, section, run, skipped=() if same_device else OF_DEVICE)


def _take(cfg: DictConfig, section: str, run: Mapping[str, Any], skipped: Sequence[str]) -> None:
    """Set a section to what the run has; links of roles stay links."""
    value = run[section]
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
    """The overrides that an evaluation would not heed."""
    is_run = subject.checkpoint is not None
    for override in overrides:
        key = override.split("=")[0].lstrip("+~")
        if key in FLAGS:
            yield f"{override}: an evaluation has a flag for this. Write {FLAGS[key]}"
        elif key == "recipe":
            if is_run:
                yield (
                    f"{override}: a checkpoint is evaluated with its run's own config.\n"
                    f"Leave the recipe out, and name what is to be otherwise: data=gsm8k"
                )
        elif not is_run and key in ("model", "model.path"):
            yield f"{override}: the model is {subject.model}, as named first. Leave this out."
        elif not any(_overlap(key, read) for read in READ):
            yield (
                f"{override}: has no effect on an evaluation, which reads {', '.join(READ)} only.\n"
                f"Leave it out."
            )


def _overlap(key: str, other: str) -> bool:
    return key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.")


def _hidden_problems(cfg: DictConfig) -> Iterator[str]:
    """Secrets that a checkpoint does not hold, and an evaluation needs."""
    for section in OF_RUN:
        node = OmegaConf.select(cfg, section)
        tree = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
        for key, value in _texts(section, tree):
            if value == HIDDEN or f"//{HIDDEN}@" in value:
                yield (
                    f"{key} = {value}: checkpoints hold no secrets.\n"
                    f"Give it again: {key}=<the secret>"
                )


def _texts(key: str, tree: Any) -> Iterator[tuple[str, str]]:
    """Every text in a config by its dotted key."""
    if isinstance(tree, dict):
        for name, item in tree.items():
            yield from _texts(f"{key}.{name}", item)
    elif isinstance(tree, str):
        yield key, tree
