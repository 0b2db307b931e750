"""`hybridrl eval`: checks options and config, starts Ray, prints and writes the results."""

import logging
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from hybridrl.app.compose import find_machine
from hybridrl.app.data import check_data
from hybridrl.app.folders import claim
from hybridrl.commands.evaluation.config import evaluation_config
from hybridrl.commands.evaluation.options import (
    EvalOptions,
    Split,
    Subject,
    find_subject,
    parse_options,
)
from hybridrl.commands.running import UsageError, run_command, warn_about_changed_model
from hybridrl.config.checks.installation import check_installation
from hybridrl.config.command.command_line import parse_argv
from hybridrl.controller.output import guard_logging
from hybridrl.models.resolve import absolute_path, model_folder

if TYPE_CHECKING:
    from hybridrl.commands.evaluation.session import Evaluation
    from hybridrl.data.sources.prompts import Prompt, PromptSets

LOG = "eval.log"


def main() -> None:
    """Run the command; exits by SystemExit unless all goes well."""
    run_command(lambda: _evaluate(sys.argv[1:]))


def _evaluate(argv: Sequence[str]) -> None:
    options = parse_options(argv)
    subject = find_subject(options.subject)
    machine = find_machine()
    config_dir = [] if options.config_dir is None else ["--config-dir", options.config_dir]
    line = parse_argv([*config_dir, *options.overrides])
    examined = evaluation_config(line, subject, machine, runs_code=options.runs_code)
    config = examined.config
    check_installation(config.hardware.accelerator)
    # Heavy imports follow the checks.
    from hybridrl.commands.evaluation.report import results_of, table_of, write_results
    from hybridrl.commands.evaluation.session import Evaluation, Totals, evaluate
    from hybridrl.controller.ray.runtime import ray_runtime

    started, begin = datetime.now(UTC), time.perf_counter()
    model_folder(config.model)  # downloads once, not in every worker
    if subject.checkpoint is not None:
        warn_about_changed_model(subject.checkpoint, config.model)
    prompts = check_data(examined)
    asked = _asked(prompts, options)
    output = _output_folder(options, subject)
    evaluation = Evaluation(options, subject, config, prompts, asked, output)
    console = Console(highlight=False, markup=False)
    console.print(_headline(evaluation), soft_wrap=True)

    def progress(samples: int, totals: Totals) -> None:
        speed = totals.tokens / totals.seconds
        done = f"{samples} of {options.samples} samples of each problem"
        console.print(f"{done}, {totals.tokens:,} tokens, {speed:,.0f} tokens/s", soft_wrap=True)

    _log_to(evaluation.output / LOG)
    with ray_runtime(config.cluster, config.hardware.accelerator):
        # Workers may have another current directory.
        config.model.path = absolute_path(config.model.path)
        totals = evaluate(evaluation, progress)
    results = results_of(evaluation, totals)
    path = write_results(evaluation, totals, results, machine, started)
    (console if console.is_terminal else Console(width=160)).print(table_of(results))
    if totals.failed:
        console.print(f"{totals.failed} scores failed and count as wrong", soft_wrap=True)
    console.print(f"{path} after {time.perf_counter() - begin:.0f} s", soft_wrap=True)


def _asked(prompts: "PromptSets", options: EvalOptions) -> "list[Prompt]":
    """Return the prompts to evaluate."""
    half = prompts.train if options.split is Split.train else prompts.held_out
    if options.problems is not None and options.problems > len(half):
        raise UsageError(
            f"--problems {options.problems}: expected at most {len(half)}, the problems of the "
            f"split {options.split.value} (data.num_eval_problems limits held_out).\n"
            "Lower --problems."
        )
    return half[: options.problems]


def _output_folder(options: EvalOptions, subject: Subject) -> Path:
    """Create the folder for the results; one of the user must be new or empty."""
    now = f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
    folder = options.output or Path("evals", subject.name, now)
    is_new = options.output is None  # not that of an evaluation begun in the same second
    if not is_new and folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UsageError(
            f"--output {folder}: it exists and is not an empty folder.\nUse a new folder."
        )
    try:
        return claim(folder, is_new=is_new).folder
    except OSError as error:
        raise UsageError(f"--output {folder} cannot be made: {error.strerror}.") from error


def _headline(evaluation: "Evaluation") -> str:
    options, subject = evaluation.options, evaluation.subject
    what = subject.model if subject.folder is None else str(subject.folder)
    sampling = "greedy" if options.greedy else f"temperature {evaluation.temperature:g}"
    asked = f"{len(evaluation.asked)} problems ({options.split.value})"
    environment = evaluation.config.environment or evaluation.config.agent
    judge = evaluation.config.reward.function if environment is None else environment.function
    return (
        f"{what}: {asked}, {options.samples} samples each, {sampling}, scored by {judge}, "
        f"into {evaluation.output}"
    )


def _log_to(file: Path) -> None:
    """Log warnings to the terminal and everything to a file, without secrets."""
    to_terminal = logging.StreamHandler()
    to_terminal.setLevel(logging.WARNING)
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        handlers=[logging.FileHandler(file), to_terminal],
        force=True,
    )
    guard_logging()
