"""Whether a run can be resumed as asked, and checkpoints be kept as asked."""

import difflib
import math
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from hybridrl.config.command.input_errors import reason_of
from hybridrl.config.command.paths import expanded
from hybridrl.config.schema import RunConfig

# What `resume` may be besides a path.
NONE, AUTO = "none", "auto"
METRIC = re.compile(r"-?\w+/\S+")


def resume_problems(config: RunConfig) -> Iterator[str]:
    """A path to resume from that is not there, or that the disk does not let be looked at."""
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


def auto_problem(config: RunConfig, hydra_overrides: Collection[str], key: str) -> str | None:
    """What is wrong with resume=auto where the run's directory is not given.

    Args:
        config: the run.
        hydra_overrides: what of Hydra's own config the command line sets.
        key: of the directory: hydra.run.dir, or hydra.sweep.dir in a sweep.
    """
    given = any(text.lstrip("+").startswith(f"{key}=") for text in hydra_overrides)
    if config.resume != AUTO or given:
        return None
    return (
        f"resume = auto, but {key} is not given: each start has a directory of its own, so there "
        f"is never a checkpoint to go on from.\n"
        f"Set {key}=<directory>, the same at each start, or resume=<path of a checkpoint>."
    )


def restart_problems(config: RunConfig) -> Iterator[str]:
    """Restarts that would all begin anew."""
    restarts = config.trainer.max_restarts
    if restarts and not config.checkpoint.every_steps:
        yield (
            f"trainer.max_restarts = {restarts} with checkpoint.every_steps = 0: there is nothing "
            f"to go on from, so each restart would begin with the first step.\n"
            f"Set checkpoint.every_steps above 0, or trainer.max_restarts=0."
        )


def retention_problems(config: RunConfig) -> Iterator[str]:
    """A metric to keep the best checkpoint by that no checkpoint before the last can have."""
    best = config.checkpoint.keep_best
    if best is None:
        return
    if not METRIC.fullmatch(best):
        yield (
            f"checkpoint.keep_best = {best}, expected a metric's name as in metrics.jsonl.\n"
            f"Set checkpoint.keep_best=eval/accuracy, or null to keep the newest alone."
        )
    elif best.removeprefix("-").startswith("eval/"):
        yield from _evaluation_problems(config, best.removeprefix("-"))


def _evaluation_problems(config: RunConfig, name: str) -> Iterator[str]:
    """A metric of evaluations that none gives, or of which none falls on a checkpoint."""
    key = f"checkpoint.keep_best = {config.checkpoint.keep_best}"
    names = _evaluation_metrics(config)
    if name not in names and not _may_be_of_a_tag(name):
        ends = [known.removeprefix("eval/") for known in names]
        near = difflib.get_close_matches(name.removeprefix("eval/"), ends, n=1)
        hint = f"Did you mean eval/{near[0]}?" if near else f"It gives {', '.join(names)}."
        yield f"{key}: no evaluation gives this metric, so no checkpoint would be the best. {hint}"
    elif _only_the_last_is_evaluated(config):
        every = config.checkpoint.every_steps
        yield (
            f"{key} with eval.every_steps = {config.eval.every_steps} and "
            f"checkpoint.every_steps = {every}: of the checkpoints of "
            f"{config.trainer.total_steps} steps only the last is of a step with an evaluation, so "
            f"better ones would be removed unseen.\n"
            f"Set eval.every_steps={every}, or checkpoint.keep_best to a metric of every step."
        )


def _evaluation_metrics(config: RunConfig) -> list[str]:
    """What each evaluation gives, but for the accuracies of tags, which only the data knows."""
    rules = ["", *(f"_{name}" for name in config.eval.rules)]
    ways = ["", "_greedy"] if config.eval.greedy else [""]
    ends = [f"{way}{rule}" for way in ways for rule in rules]
    of_rules = [f"eval/{what}{end}" for what in ("accuracy", "ci95") for end in ends]
    return [*of_rules, "eval/length_mean", "eval/truncated_fraction", "eval/failed"]


def _may_be_of_a_tag(name: str) -> bool:
    """Whether a metric may be the accuracy on the problems of a tag."""
    return name.startswith("eval/accuracy_") and name != "eval/accuracy_greedy"


def _only_the_last_is_evaluated(config: RunConfig) -> bool:
    """Whether checkpoints are removed in a run, and none but the last is of an evaluated step.

    Both come every so many steps, and after the last one.
    """
    every, last = config.checkpoint.every_steps, config.trainer.total_steps
    some_are_removed = 0 < every * config.checkpoint.keep_last < last
    return some_are_removed and not 0 < math.lcm(every, config.eval.every_steps) < last
