"""Whether a run can be resumed as asked, and checkpoints be kept as asked."""

import re
from collections.abc import Collection, Iterator
from pathlib import Path

from hybridrl.config.schema import RunConfig

# What `resume` may be besides a path.
NONE, AUTO = "none", "auto"
METRIC = re.compile(r"-?\w+/\S+")


def resume_problems(config: RunConfig) -> Iterator[str]:
    """A path to resume from that is not there."""
    if config.resume not in (NONE, AUTO) and not Path(config.resume).expanduser().exists():
        yield (
            f"resume = {config.resume}, expected none, auto, or the path of a checkpoint or of a "
            f"run: there is no such folder (seen from {Path.cwd()}).\n"
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
    """A metric to keep the best checkpoint by that no metric is called."""
    best = config.checkpoint.keep_best
    if best is not None and not METRIC.fullmatch(best):
        yield (
            f"checkpoint.keep_best = {best}, expected a metric's name as in metrics.jsonl.\n"
            f"Set checkpoint.keep_best=eval/accuracy, or null to keep the newest alone."
        )
