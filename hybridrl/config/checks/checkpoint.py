"""Checks of resuming and of the retention of checkpoints."""

import difflib
import math
import re
from collections.abc import Iterator
from pathlib import Path

from hybridrl.config.choices import Targets
from hybridrl.config.command.input_errors import expanded, reason_of
from hybridrl.config.errors import Problem
from hybridrl.config.estimators import is_supervised, trains_reward_model
from hybridrl.config.policy_losses import targets_of
from hybridrl.config.schema import RunConfig

# Values of `resume` besides a path.
NONE, AUTO = "none", "auto"
# Part of a directory's name that differs between starts.
NEW_EACH_TIME = "${now:"
METRIC = re.compile(r"-?\w+/\S+")
BEST = "checkpoint.keep_best"


def restart_problems(config: RunConfig) -> Iterator[Problem]:
    """Check that a run with restarts writes checkpoints."""
    restarts = config.trainer.max_restarts
    if restarts and not config.checkpoint.every_steps:
        key, expected = "trainer.max_restarts", "0 with checkpoint.every_steps = 0"
        why = "without checkpoints each restart would begin at the first step"
        remedy = f"Set checkpoint.every_steps above 0, or {key}=0"
        yield Problem("restarts", key, restarts, expected, why, remedy)


def resume_problems(config: RunConfig) -> Iterator[Problem]:
    """Check that the path to resume from exists and can be read."""
    if config.resume in (NONE, AUTO):
        return
    try:
        why = "" if expanded(config.resume).exists() else "there is no such folder"
    except (OSError, ValueError) as error:
        why = f"it cannot be read: {reason_of(error)}"
    if why:
        expected = "none, auto, or the path of a checkpoint or of a run"
        remedy = "Set resume=<run>/checkpoints/step_<n>, or resume=<run> for its newest checkpoint"
        why += f" (seen from {Path.cwd()})"
        yield Problem("resume_path", "resume", config.resume, expected, why, remedy)


def auto_problem(resume: str, key: str, folder: str) -> Problem | None:
    """Return the problem of resume=auto in a directory that is new at each start.

    `key` is hydra.run.dir, or hydra.sweep.dir in a sweep; `folder` its value, links unresolved.
    """
    if resume != AUTO or NEW_EACH_TIME not in folder:
        return None
    why = f"{key} is not set: each start gets a new directory without checkpoints"
    remedy = f"Set {key}=<directory>, the same for each start, or type hybridrl resume <run>"
    return Problem("resume_auto", "resume", AUTO, "", why, remedy)


def retention_problems(config: RunConfig) -> Iterator[Problem]:
    """Check that checkpoints before the last can have the metric of checkpoint.keep_best."""
    best = config.checkpoint.keep_best
    if best is None:
        return
    if not METRIC.fullmatch(best):
        expected = "a metric's name as in metrics.jsonl"
        remedy = f"Set {BEST}=eval/accuracy, or null to keep only the newest"
        yield Problem("metric_name", BEST, best, expected, "", remedy)
    elif best.removeprefix("-").startswith("eval/"):
        yield from _evaluation_problems(config, best)


def _evaluation_problems(config: RunConfig, best: str) -> Iterator[Problem]:
    """Check that evaluations give a metric, and that some fall on checkpoints."""
    rules = ["", *(f"_{rule}" for rule in config.eval.rules)]
    ways = ["", "_greedy"] if config.eval.greedy else [""]
    ends = [f"{way}{rule}" for way in ways for rule in rules]
    names = [f"{what}{end}" for what in ("accuracy", "ci95") for end in ends]
    names += ["length_mean", "truncated_fraction", "failed"]
    if is_supervised(config):
        names += ["nll"] + ["preference_accuracy"] * (targets_of(config) is Targets.pairs)
    if trains_reward_model(config):
        names = ["preference_accuracy"]
    own = best.removeprefix("-").removeprefix("eval/")
    # Accuracies of tags depend on the data.
    may_be_of_a_tag = own.startswith("accuracy_") and own != "accuracy_greedy"
    may_be_of_a_tag &= not trains_reward_model(config)
    if own not in names and not may_be_of_a_tag:
        near = difflib.get_close_matches(own, names, n=1)
        given = ", ".join(f"eval/{known}" for known in names)
        remedy = f"Did you mean eval/{near[0]}?" if near else f"Evaluations give {given}"
        why = "no evaluation gives this metric, so no checkpoint would be the best"
        yield Problem("unknown_metric", BEST, best, "", why, remedy)
    elif _only_the_last_is_evaluated(config):
        every = config.checkpoint.every_steps
        why = (
            f"with eval.every_steps = {config.eval.every_steps} and checkpoint.every_steps = "
            f"{every} only the last of the checkpoints is evaluated, so better ones would be "
            f"removed"
        )
        remedy = f"Set eval.every_steps={every}, or {BEST} to a metric of every step"
        yield Problem("unevaluated_checkpoints", BEST, best, "", why, remedy)


def _only_the_last_is_evaluated(config: RunConfig) -> bool:
    """Return whether a run removes checkpoints and evaluates at none but the last one's step.

    Both happen at fixed intervals, and after the last step.
    """
    every, last = config.checkpoint.every_steps, config.trainer.total_steps
    some_are_removed = 0 < every * config.checkpoint.keep_last < last
    return some_are_removed and not 0 < math.lcm(every, config.eval.every_steps) < last
