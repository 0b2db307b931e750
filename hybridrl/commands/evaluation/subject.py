"""A checkpoint or a model to sample from, and the config with which it is sampled.

Data, reward, limits and seed come from the run; hardware, nodes and sharding from this machine.
Overrides replace both.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from hybridrl.app.compose import composed, find_machine, stored_weight_problems
from hybridrl.checkpoint.files import CHECKPOINTS, MANIFEST, step_of
from hybridrl.checkpoint.verification import VerifiedCheckpoint
from hybridrl.commands.running import UsageError, checkpoint_at, warn_about_changed_model
from hybridrl.commands.runs import FOLDERS
from hybridrl.config.checks.installation import check_installation
from hybridrl.config.choices import Init
from hybridrl.config.command.command_line import CommandLine, parse_argv
from hybridrl.config.command.provenance import provenance_of
from hybridrl.config.errors import ConfigError
from hybridrl.config.keys import leaves
from hybridrl.config.load import Examined, examine
from hybridrl.config.planner.machine import Machine
from hybridrl.config.schema_keys import SHARED
from hybridrl.config.user_code.untrusted_code import refuse_untrusted_code
from hybridrl.models.resolve import model_folder, read_model_config
from hybridrl.trainer.tracking.provenance import HIDDEN

# Sections from the run that sampling needs, and those of an evaluation.
OF_SAMPLING = ("seed", "model", "lora", "data", "rollout")
OF_RUN = (*OF_SAMPLING, "reward", "environment", "agent", "eval")
# Keys of rollout that are not from the run if it had another device.
OF_DEVICE = (
    *("dtype", "enforce_eager", "exact", "gpu_memory_utilization"),
    *("kv_cache_mb", "max_num_seqs", "sleep"),
)
# Sections and further keys that an evaluation reads.
SECTIONS = (
    *("seed", "hardware", "model", "data", "fsdp", "cluster", "placement"),
    *("rollout", "reward", "environment", "agent"),
)
READ = (*SECTIONS, "run.name", "eval.rules", "eval.top_k", "eval.top_p")
# Keys that a flag replaces.
FLAGS = {
    "rollout.responses_per_prompt": "--samples N",
    "eval.greedy": "--greedy",
    "eval.samples": "--samples N",
    "hydra.run.dir": "--output DIR",
}
# File of a model, and characters of a name; file systems allow 255 bytes.
_MODEL, _NAME_CHARS = "config.json", 100


@dataclass(frozen=True)
class Subject:
    """A checkpoint or a model in Hugging Face format.

    Attributes:
        name: for output and folders; one component of a path.
        model: the value of model.path; None for a checkpoint, whose run has it.
    """

    name: str
    model: str | None = None
    checkpoint: VerifiedCheckpoint | None = None

    @property
    def step(self) -> int:
        """Training step of the weights, from which seeds derive; 0 for a model."""
        return self.checkpoint.manifest.step if self.checkpoint else 0

    @property
    def folder(self) -> Path | None:
        """Folder of the checkpoint; None for a model."""
        return self.checkpoint.folder if self.checkpoint else None


def find_subject(path: str) -> Subject:
    """Find a checkpoint or a model.

    The path is that of a checkpoint's or a model's folder, `embedded`, or a name on the hub. Of a
    run's directory, or of its checkpoints folder, the newest good checkpoint is meant.

    Raises:
        ConfigError: the folder is neither, or the checkpoint is damaged.
    """
    folder = Path(path).expanduser()
    if not folder.exists():
        if path.startswith((*(f"{runs}/" for runs in FOLDERS), "./", "../", "/")):
            raise UsageError(
                f"{path}: there is no such run or folder (seen from {Path.cwd()}).\n"
                f"hybridrl runs lists runs."
            )
        return Subject(name=safe_name(Path(path).name), model=path)
    name = folder.resolve().name
    if (folder / _MODEL).is_file():
        return Subject(name=safe_name(name), model=str(folder))
    is_of_run = name == CHECKPOINTS or (folder / CHECKPOINTS).is_dir() or step_of(name) is not None
    if not (is_of_run or (folder / MANIFEST).is_file() or folder.is_file()):
        raise UsageError(
            f"{path}: neither a checkpoint, nor the directory of a run with {CHECKPOINTS}/, nor a "
            f"model's folder with {_MODEL}.\nUse one of these, or a model on the hub."
        )
    checkpoint = checkpoint_at(folder)
    run = safe_name(str(checkpoint.manifest.config["run"]["name"]))
    return Subject(name=f"{run}_step_{checkpoint.manifest.step}", checkpoint=checkpoint)


def safe_name(text: str) -> str:
    """Return a text as a single, safe component of a path."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text)[:_NAME_CHARS].lstrip(".") or "model"


def prepared(
    subject: Subject,
    overrides: Sequence[str],
    *,
    runs_code: bool,
    sections: Sequence[str] = OF_RUN,
) -> Examined:
    """Return the config of a subject on this machine, whose model is there; see below."""
    line = parse_argv(overrides)
    result = evaluation_config(
        line, subject, find_machine(), runs_code=runs_code, sections=sections
    )
    config = result.config
    check_installation(config.hardware.accelerator)
    model_folder(config.model)  # downloads once, not in every worker
    if subject.checkpoint is not None:
        warn_about_changed_model(subject.checkpoint, config.model)
    return result


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
    if problems := [*idle_problems(line.overrides, subject)]:
        raise ConfigError(*problems)
    own = {} if subject.checkpoint is None else _own(subject.checkpoint)
    if "${" in json.dumps(own):  # could read environment variables
        raise ConfigError(
            f"{subject.folder}: its config has a value with ${{...}}, expected the resolved "
            f"values that a run writes.\nUse a checkpoint written by hybridrl."
        )
    composition = composed(line, lambda: machine, partial(underlay, subject, sections=sections))
    if composition.problems or composition.cfg is None:
        raise ConfigError(*composition.problems)
    if own and not runs_code:
        used = {name: part for name, part in own.items() if name in sections}
        refuse_untrusted_code(used, str(subject.folder), line.overrides, runs_rewards=True)
    result = examine(
        composition.cfg,
        machine=machine,
        read_model=read_model_config,
        provenance=provenance_of(composition.overrides, []),
        trains=False,
    )
    weights = () if subject.checkpoint else stored_weight_problems(result, on_hub=False)
    for problem in (*_hidden_problems(composition.cfg), *weights):
        result.report.add(problem)
    if result.report.problems:
        raise ConfigError(*result.report.problems)
    return result


def _own(checkpoint: VerifiedCheckpoint) -> dict[str, Any]:
    """Return the parts of the run's config that an evaluation uses."""
    run = checkpoint.manifest.config
    sections = {name: run[name] for name in OF_RUN if name in run}
    return {"run": {"name": run["run"]["name"]}} | sections


def underlay(
    subject: Subject, cfg: DictConfig, groups: Sequence[str], sections: Sequence[str] = OF_RUN
) -> None:
    """Set the subject's values in a config composed of groups, except in chosen groups."""
    with open_dict(cfg):
        if subject.checkpoint is None:
            cfg.model.path, cfg.model.init = subject.model, Init.pretrained.value
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
        is_shared = f"{section}.{key}" in SHARED
        is_seed = key == "seed" and item == run["seed"]
        if is_shared or (is_seed and OmegaConf.is_interpolation(cfg[section], key)):
            continue
        if section != "rollout" or key not in skipped:
            cfg[section][key] = item


def idle_problems(overrides: Sequence[str], subject: Subject) -> Iterator[str]:
    """Find overrides without effect on an evaluation."""
    refused = {
        key: f"an evaluation has a flag for this key.\nType {flag}" for key, flag in FLAGS.items()
    }
    refused["placement.rollout_gpus"] = "in an evaluation every rank samples.\nRemove it."
    if subject.checkpoint is None:
        model = f"the model is {subject.model}, the first argument.\nRemove this."
        refused |= {"model": model, "model.path": model}
    else:
        refused["recipe"] = (
            "a checkpoint is evaluated with its run's own config.\n"
            "Remove the recipe, and add single changes, such as data=gsm8k"
        )
    for override in overrides:
        key = override.split("=")[0].lstrip("+~")
        if key in refused:
            yield f"{override}: {refused[key]}"
        elif key != "recipe" and not any(_overlap(key, read) for read in READ):
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
