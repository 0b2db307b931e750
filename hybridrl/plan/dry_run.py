"""Dry run: the plan of a run, and the checkpoint that it would go on from."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from hybridrl.app.checked import Checked
from hybridrl.app.compose import make_paths_absolute
from hybridrl.app.lock import exclusive_run
from hybridrl.checkpoint.files import checkpoints_folder, steps_in
from hybridrl.checkpoint.verification import verify
from hybridrl.config.checks.checkpoint import NONE
from hybridrl.config.load import Examined
from hybridrl.plan.tables import plan
from hybridrl.trainer.checkpointing.verification import VerificationProgress

if TYPE_CHECKING:
    from hybridrl.data.sources.prompts import PromptSets

log = logging.getLogger(__name__)


def dry_run(checked: Checked, folder: Path) -> None:
    """Print the plan of a checked run without problems; starts and writes nothing.

    Raises:
        ConfigError: the run in `folder` would be refused because of its checkpoint.
    """
    assert checked.prompts is not None
    checkpoint = _checkpoint(checked.result, checked.prompts, folder)
    show_plan(checked.result, checked.prompts, checkpoint)


def show_plan(
    result: Examined, prompts: "PromptSets", checkpoint: Sequence[tuple[str, str]] = ()
) -> None:
    """Print the plan of a run without problems; `checkpoint` are lines of the one to go on from."""
    from hybridrl.trainer.tracking.header import input_lines

    console = Console()
    assert result.shape is not None
    inputs = [*input_lines(result.config, prompts), *checkpoint]
    table = plan(result.config, result.shape, result.machine, result.frozen, inputs)
    (console if console.is_terminal else Console(width=160)).print(table)


def _checkpoint(result: Examined, prompts: "PromptSets", folder: Path) -> list[tuple[str, str]]:
    """Find, verify and describe the checkpoint that a run would go on from, as it would itself."""
    is_used = bool(steps_in(checkpoints_folder(folder)))
    if result.config.resume == NONE and not is_used:
        return []
    from hybridrl.app.session import read_inputs  # heavy
    from hybridrl.trainer.checkpointing.resume import described

    make_paths_absolute(result.config)
    with ExitStack() as stack:
        if is_used:
            stack.enter_context(exclusive_run(folder))
        watch = stack.enter_context(VerificationProgress(log.info))
        inputs = read_inputs(result.config, folder, prompts, partial(verify, watch=watch))
    return described(inputs.resume, result.config, folder)
