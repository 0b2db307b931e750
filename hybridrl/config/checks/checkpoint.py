"""Checks of resuming and of the retention of checkpoints."""

import difflib
import math
import re
from collections.abc import Iterator
from pathlib import Path

from hybridrl.config.command.input_errors import expanded, reason_of
from hybridrl.config.estimators import is_supervised
from hybridrl.config.schema import RunConfig

# Values of `resume` besides a path.
NONE, AUTO = "none", "auto"
# Part of a directory's name that differs between starts.
NEW_EACH_TIME = "${now:"
METRIC = re.compile(r"-?\w+/\S+")


def resume_problems(config: RunConfig) -> Iterator[str]:
    """Check that the path to resume from exists and can be read."""
    if config.resume in (NONE, AUTO):
        return
    try:
        problem = None if expanded(config.resume).exists() else "there is no such folder"
    except (OSError, ValueError) as error:
        problem = f"it cannot be read: {reason_of(error)}"
    if problem is not None:
        yield (
            f"resume = {config.resume}, expected none, auto, or the path of a checkpoint or of a "
            f"run: {problem} (seen from {Path.cwd()}).\n"
            f"Set resume=<run>/checkpoints/step_<n>, or resume=<run> for its newest checkpoint."
        )


def auto_problem(resume: str, key: str, folder: str) -> str | None:
    """Return the problem of resume=auto in a directory that is new at each start.

    `key` is hydra.run.dir, or hydra.sweep.dir in a sweep; `folder` its value, links unresolved.
    """
    if resume != AUTO or NEW_EACH_TIME not in folder:
        return None
    return (
        f"resume = auto, but {key} is not set: each start gets a new directory without "
        f"checkpoints.\n"
        f"Set {key}=<directory>, the same for each start, or type hybridrl resume <run>."
    )


def restart_problems(config: RunConfig) -> Iterator[str]:
    """Check that a run with restarts writes checkpoints."""
    restarts = config.trainer.max_restarts
    if restarts and not config.checkpoint.every_steps:
        yield (
            f"trainer.max_restarts = {restarts} with checkpoint.every_steps = 0: without "
            f"checkpoints each restart would begin at the first step.\n"
            f"Set checkpoint.every_steps above 0, or trainer.max_restarts=0."
        )


def retention_problems(config: RunConfig) -> Iterator[str]:
    """Check that checkpoints before the last can have the metric of checkpoint.keep_best."""
    best = config.checkpoint.keep_best
    if best is None:
        return
    if not METRIC.fullmatch(best):
        yield (
            f"checkpoint.keep_best = {best}, expected a metric's name as in metrics.jsonl.\n"
            f"Set checkpoint.keep_best=eval/accuracy, or null to keep only the newest."
        )
    elif best.removeprefix("-").startswith("eval/"):
        yield from _evaluation_problems(config, best.removeprefix("-"))


def _evaluation_problems(config: RunConfig, name: str) -> Iterator[str]:
    """Check that evaluations give a metric, and that some fall on checkpoints."""
    key = f"checkpoint.keep_best = {config.checkpoint.keep_best}"
    rules = ["", *(f"_{rule}" for rule in config.eval.rules)]
    ways = ["", "_greedy"] if config.eval.greedy else [""]
    ends = [f"{way}{rule}" for way in ways for rule in rules]
    names = [f"{what}{end}" for what in ("accuracy", "ci95") for end in ends]
    names += ["length_mean", "truncated_fraction", "failed"]
    names += ["nll"] if is_supervised(config) else []
    own = name.removeprefix("eval/")
    # Accuracies of tags depend on the data.
    may_be_of_a_tag = own.startswith("accuracy_") and own != "accuracy_greedy"
    if own not in names and not may_be_of_a_tag:
        near = difflib.get_close_matches(own, names, n=1)
        given = ", ".join(f"eval/{known}" for known in names)
        hint = f"Did you mean eval/{near[0]}?" if near else f"Evaluations give {given}."
        yield f"{key}: no evaluation gives this metric, so no checkpoint would be the best. {hint}"
    elif _only_the_last_is_evaluated(config):
        every = config.checkpoint.every_steps
        yield (
            f"{key} with eval.every_steps = {config.eval.every_steps} and "
            f"checkpoint.every_steps = {every}: of the checkpoints of "
            f"{config.trainer.total_steps} steps only the last is evaluated, so better ones would "
            f"be removed.\n"
            f"Set eval.every_steps={every}, or checkpoint.keep_best to a metric of every step."
        )


def _only_the_last_is_evaluated(config: RunConfig) -> bool:
    """Return whether a run removes checkpoints and evaluates at none but the last one's step.

    Both happen at fixed intervals, and after the last step.
    """
    every, last = config.checkpoint.every_steps, config.trainer.total_steps
    some_are_removed = 0 < every * config.checkpoint.keep_last < last
    return some_are_removed and not 0 < math.lcm(every, config.eval.every_steps) < last
