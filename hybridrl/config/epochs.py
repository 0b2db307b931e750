"""Steps of a run whose length is trainer.epochs, passes over its training prompts."""

import math
from operator import attrgetter

from hybridrl.config.changes import FOLLOWING, STEPS
from hybridrl.config.command.report import Report
from hybridrl.config.schema import RunConfig
from hybridrl.config.validate import STEP_CHECKS, run

# Share of a step that rounding of trainer.epochs may add.
_ROUNDING = 1e-9


def set_steps(config: RunConfig, num_prompts: int, report: Report) -> None:
    """Set the steps of trainer.epochs, if it is set, and add the problems of this length.

    Each step trains data.prompts_per_step prompts, and the last pass is whole. Keys that link to
    trainer.total_steps follow.
    """
    if not report.usable(["trainer", "data.prompts_per_step"]) or config.trainer.epochs is None:
        return
    steps = config.trainer.epochs * num_prompts / config.data.prompts_per_step
    total, before = max(1, math.ceil(steps - _ROUNDING)), config.trainer.total_steps
    for key in (STEPS, *FOLLOWING[STEPS]):
        section, name = key.split(".")
        if report.usable([key]) and attrgetter(key)(config) == before:
            setattr(vars(config)[section], name, total)
    run([check(config) for check in STEP_CHECKS], report)
