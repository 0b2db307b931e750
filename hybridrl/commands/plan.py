"""`hybridrl plan`: does a run fit GPUs that need not be here, what helps, what a step takes."""

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from hybridrl.app.compose import composed, find_machine
from hybridrl.commands.running import UsageError, argument, parsed, run_command
from hybridrl.config.choices import Accelerator
from hybridrl.config.command.command_line import parse_argv
from hybridrl.config.command.overrides import quoted
from hybridrl.config.command.provenance import provenance_of
from hybridrl.config.errors import ConfigError
from hybridrl.config.estimators import uses_critic
from hybridrl.config.load import Examined, examine
from hybridrl.config.planner.fitting import MOST_GPUS, NODE_GPUS, Change, MemoryCase, remedy
from hybridrl.config.planner.machine import GIB, GPU, Machine, planned_machine
from hybridrl.config.planner.memory import gib
from hybridrl.config.schema import RunConfig
from hybridrl.models.known_shapes import KNOWN
from hybridrl.models.resolve import read_model_config
from hybridrl.plan.verdict import verdict

DESCRIPTION = """\
Plan a run: its memory by phase, settings with which it fits, estimated seconds a step, the command.
Needs neither GPU nor network nor the model's weights.

  hybridrl plan model=qwen2_5_7b gpus=8x80GB              GPUs that are not here
  hybridrl plan +recipe=gsm8k_grpo gpus=8xA100            A100, H100, H200, B200 or L40S
  hybridrl plan model=qwen2_5_7b gpus=2x8x80GB            two nodes of eight
  hybridrl plan +recipe=gsm8k_grpo                        the GPUs of this machine
  hybridrl plan model.path=FOLDER gpus=1x24GB             a folder with a config.json

Everything else is as in hybridrl train: +recipe=, groups, key=value.
"""
EPILOG = "Exit codes: 0 it fits, 1 it does not, 2 a wrong argument or config."
GPUS_KEY = "gpus="
# Memory in GiB by name.
NAMED = {"A100": 80, "H100": 80, "H200": 140, "B200": 179, "L40S": 45}
GPUS = re.compile(
    rf"(?:(\d+)x)?(\d+)x(?:(\d+(?:\.\d+)?)(?:GB|GiB)|({'|'.join(NAMED)}))", re.IGNORECASE
)
EXAMPLES = f"8x80GB, 2x8x80GB (nodes x GPUs), 8xH100 (or {', '.join(NAMED)})"
EXIT_DOES_NOT_FIT = 1
# Keys that gpus= sets.
SIZES = ("cluster.nodes=", "cluster.gpus_per_node=", "placement.slots_on_nodes=")
# Keys of a plan that a run does not need.
ONLY_PLANNED = ("run.dry", "cluster.gpu_memory_gb")
# Smaller ways to train, largest first.
ALTERNATIVES = (
    ("algorithm=grpo",),
    ("lora=default",),
    ("algorithm=grpo", "lora=default"),
    ("model=qwen2_5_1_5b",),
    ("algorithm=grpo", "model=qwen2_5_1_5b", "lora=default"),
    ("model=qwen2_5_0_5b",),
)


class Plan(NamedTuple):
    """Memory of a run, and the run examined."""

    case: MemoryCase
    examined: Examined


def main() -> None:
    """Run the command; exits by SystemExit."""
    words = argument("words", nargs="*", metavar="key=value", help="gpus=, and of a run")
    args = parsed("plan", DESCRIPTION, words, epilog=EPILOG)
    run_command(lambda: plan(args.words))


def plan(arguments: list[str]) -> None:
    """Print the plan of a run; exits with 1 if it does not fit.

    Raises:
        ConfigError: an argument or the config is wrong.
    """
    gpus = [word.removeprefix(GPUS_KEY) for word in arguments if word.startswith(GPUS_KEY)]
    overrides = [word for word in arguments if not word.startswith(GPUS_KEY)]
    nodes, machine = _machine(gpus[-1] if gpus else None)
    others = [a for a in overrides if a.lstrip("+").startswith(SIZES) and a not in nodes]
    if nodes and others:
        raise UsageError(
            f"{others[0]}: gpus= has the nodes and their GPUs, {' '.join(nodes)}.\n"
            f"Leave one of them out."
        )
    case, examined = make_plan([*overrides, *nodes], machine)
    fits = case.fits()
    changes = [] if fits else remedy(case)
    console = Console(highlight=False, markup=False)
    console = console if console.is_terminal else Console(width=120, highlight=False, markup=False)
    for part in verdict(case, examined.chosen, changes):
        console.print(part)
    if not fits:
        for line in _alternatives(case, [*overrides, *nodes], machine):
            console.print(line)
    if changes is not None:
        planned = case.changed(changes).config
        command = _command(overrides, planned, changes)
        console.print(f"\nCommand:\n  {shlex.join(command)}", soft_wrap=True)
        job = shlex.join(slurm_command(planned, command))
        console.print(f"With Slurm, in hybridrl's repository:\n  {job}", soft_wrap=True)
    sys.exit(0 if fits else EXIT_DOES_NOT_FIT)


def make_plan(overrides: list[str], machine: Machine) -> Plan:
    """Return the plan of a run with these overrides on a machine.

    Raises:
        ConfigError: the config has other problems than memory.
    """
    line = parse_argv([*overrides, "run.dry=true"])
    composition = composed(line, lambda: machine)
    if composition.problems or composition.cfg is None:
        raise ConfigError(*composition.problems)
    examined = examine(
        composition.cfg,
        machine=machine,
        read_model=_model_config,
        provenance=provenance_of(composition.overrides, []),
        checks_memory=False,
    )
    if examined.report.problems:
        raise ConfigError(*examined.report.problems)
    config, shape = examined.config, examined.shape
    assert shape is not None
    if config.hardware.accelerator is not Accelerator.gpu or not examined.machine.gpus:
        raise UsageError(
            f"no GPUs to plan for: {machine.describe()}.\nType gpus=: {EXAMPLES}. A run without "
            f"GPU is planned by hybridrl train ... hardware=cpu run.dry=true."
        )
    return Plan(MemoryCase(config, shape, examined.frozen, examined.machine), examined)


def _machine(gpus: str | None) -> tuple[list[str], Machine]:
    """Return the machine of gpus=, with its settings, or the one that is here."""
    if gpus is None:
        return [], find_machine()
    if match := GPUS.fullmatch(gpus):
        nodes, count, name = int(match[1] or 1), int(match[2]), (match[4] or "").upper()
        each = count if match[1] else min(count, NODE_GPUS)
        size = int(GIB * (NAMED[name] if name else float(match[3])))
        if size and 0 < nodes * count <= MOST_GPUS and count % each == 0:
            nodes *= count // each
            gpu = GPU(f"NVIDIA {name}" if name else "GPUs", size)
            settings = [f"cluster.nodes={nodes}", f"cluster.gpus_per_node={each}"]
            return settings, planned_machine([each] * nodes, gpu)
    raise UsageError(
        f"gpus={gpus}, expected GPUs and their memory: {EXAMPLES}; expected 1 to {MOST_GPUS} GPUs, "
        f"in whole nodes of {NODE_GPUS} or as nodes x GPUs x memory."
    )


def _model_config(path: str) -> dict[str, Any]:
    """Return a model's config.json; of known models without their files."""
    return KNOWN[path] if path in KNOWN and not Path(path).exists() else read_model_config(path)


def _alternatives(case: MemoryCase, overrides: list[str], machine: Machine) -> Iterator[str]:
    """Yield smaller ways to train that fit the same GPUs."""
    fitting = []
    without_critic = () if uses_critic(case.config) else ("algorithm=grpo",)
    wanted = [tuple(c for c in changes if c not in without_critic) for changes in ALTERNATIVES]
    for changes in filter(None, dict.fromkeys(wanted)):
        try:
            other = make_plan([*overrides, *changes], machine).case
        except ConfigError:
            continue
        is_model = any(change.startswith("model=") for change in changes)
        is_smaller = other.shape.parameters < case.shape.parameters
        if other.fits() and (is_smaller or not is_model):
            fitting.append(f"{' '.join(changes)} ({gib(other.peak())})")
    if fitting:
        yield f"\nOn these GPUs fit: {'; '.join(fitting)}."


def _command(overrides: list[str], planned: RunConfig, changes: list[Change]) -> list[str]:
    """Return the training command, with the settings that make it fit."""
    kept = [o for o in overrides if o.split("=")[0].lstrip("+") not in ONLY_PLANNED]
    kept += map(str, changes)
    nodes = planned.cluster.nodes
    if nodes > 1 and not any(o.startswith("cluster.nodes=") for o in kept):
        kept.append(f"cluster.nodes={nodes}")
    return ["hybridrl", "train", *kept]


def slurm_command(config: RunConfig, command: list[str]) -> list[str]:
    """Return the command that submits a run; if requeued, it goes on from its newest checkpoint."""
    name, cluster = config.run.name, config.cluster
    sizes = {"job-name": name, "nodes": cluster.nodes, "gpus-per-node": cluster.gpus_per_node}
    requeue = {"resume": "auto", "hydra.run.dir": quoted(f"outputs/{name}")}
    is_set = {word.partition("=")[0] for word in command}
    return [
        "sbatch",
        *(f"--{key}={value}" for key, value in sizes.items()),
        "deploy/slurm/train.sbatch",
        *command,
        *(f"{key}={value}" for key, value in requeue.items() if key not in is_set),
    ]
