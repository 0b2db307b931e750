"""Whether a run can be resumed as asked, and checkpoints be kept as asked."""

import re
from collections.abc import Iterator
from pathlib import Path

from hybridrl.config.schema import RunConfig

# What `resume` may be besides a path.
NONE, AUTO = "none", "auto"
METRIC = re.compile(r"-?\w+/\S+")


def resume_problems(config: RunConfig) -> Iterator[str]:
    """A path to resume from that is not there."""
    if config.resume not in (NONE, AUTO) and not Path(config.resume).exists():
        yield (
            f"resume = {config.resume}, expected none, auto, or the path of a checkpoint or of a "
            f"run: there is no such folder (seen from {Path.cwd()}).\n"
            f"Set resume=<run>/checkpoints/step_<n>, or resume=<run> for its newest checkpoint."
        )


def retention_problems(config: RunConfig) -> Iterator[str]:
    """A metric to keep the best checkpoint by that no metric is called."""
    best = config.checkpoint.keep_best
    if best is not None and not METRIC.fullmatch(best):
        yield (
            f"checkpoint.keep_best = {best}, expected a metric's name as in metrics.jsonl.\n"
            f"Set checkpoint.keep_best=eval/accuracy, or null to keep the newest alone."
        )
