"""`hybridrl eval`: checks options and config, starts Ray, prints and writes the results."""

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from hybridrl.app.data import check_data
from hybridrl.app.folders import claim
from hybridrl.commands.evaluation.subject import Subject, find_subject, prepared
from hybridrl.commands.running import (
    CONFIG_DIR,
    OVERRIDES,
    RUN_CODE,
    SUBJECT,
    UsageError,
    argument,
    parsed,
    run_command,
)
from hybridrl.controller.output import guard_logging
from hybridrl.models.resolve import absolute_path

if TYPE_CHECKING:
    from hybridrl.commands.evaluation.session import Evaluation, Totals
    from hybridrl.data.sources.prompts import Prompt, PromptSets

LOG = "eval.log"
DESCRIPTION = """\
Score a checkpoint or any Hugging Face model on a data set: mean score and pass@k, with the
completions.

  hybridrl eval outputs/x                                 newest good checkpoint of a run
  hybridrl eval outputs/x/checkpoints/step_00000020       that one
  hybridrl eval outputs/x data=gsm8k rollout.temperature=0.6 --samples 8
  hybridrl eval Qwen/Qwen2.5-0.5B-Instruct data=gsm8k --greedy

A checkpoint is scored as in its run's evaluations: with the run's data, reward, limits and seed.
Overrides as in `hybridrl train`: groups (data=, reward=, hardware=) and key=value.
"""


def main() -> None:
    """Run the command; exits by SystemExit unless all goes well."""
    run_command(lambda: _evaluate(parse_options(sys.argv[1:])))


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """Parse an argv; exits with code 2 on a wrong flag, raises UsageError on contradictions."""
    args = parsed(
        "eval",
        DESCRIPTION,
        SUBJECT,
        OVERRIDES,
        argument("--samples", type=_positive, default=1, metavar="N", help="of each problem (1)"),
        argument("--k", type=_ks, dest="ks", metavar="1,4,8", help="of pass@k (1, 2, 4... to N)"),
        argument("--greedy", action="store_true", help="decode greedily; one sample"),
        argument("--problems", type=_positive, metavar="N", help="only the first N (all)"),
        argument("--split", choices=["held_out", "train"], default="held_out", help="(held_out)"),
        argument(
            "--correct-at",
            type=float,
            default=1.0,
            metavar="SCORE",
            help="smallest score of a correct response (1)",
        ),
        argument("--output", type=Path, metavar="DIR", help="new (evals/<name>/<time>)"),
        RUN_CODE,
        CONFIG_DIR,
        argv=argv,
    )
    # By default 1, 2, 4... up to the number of samples.
    powers = [2**power for power in range(args.samples.bit_length())]
    args.ks = powers if args.ks is None else sorted(set(args.ks))
    problems = []
    if args.greedy and args.samples > 1:
        problems.append(
            f"--greedy with --samples {args.samples}: greedy decoding gives the same response each "
            f"time.\nRemove --samples, or remove --greedy to sample at rollout.temperature."
        )
    if (k := args.ks[-1]) > args.samples:
        problems.append(
            f"--k {k} with --samples {args.samples}: pass@{k} needs at least {k} samples per "
            f"problem.\nAdd --samples {k}, or lower --k."
        )
    if problems:
        raise UsageError(*problems)
    return args


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}, expected an integer of at least 1")
    return int(text)


def _ks(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def _evaluate(options: argparse.Namespace) -> None:
    started, begin = datetime.now(UTC), time.perf_counter()
    subject = find_subject(options.subject)
    examined = prepared(subject, options.line, runs_code=options.run_code)
    config = examined.config
    # Heavy imports follow the checks.
    from hybridrl.commands.evaluation.results import results_of, table_of, write_results
    from hybridrl.commands.evaluation.session import Evaluation, Split, evaluate
    from hybridrl.controller.ray.runtime import ray_runtime

    prompts = check_data(examined)
    split, shown = Split(options.split), Console(highlight=False, markup=False)
    evaluation = Evaluation(
        subject,
        config,
        _asked(prompts, options),
        _output_folder(options.output, subject),
        options.samples,
        options.ks,
        options.greedy,
        split,
        options.correct_at,
    )
    shown.print(_headline(evaluation), soft_wrap=True)

    def progress(samples: int, totals: "Totals") -> None:
        speed = totals.tokens / totals.seconds
        done = f"{samples} of {options.samples} samples of each problem"
        shown.print(f"{done}, {totals.tokens:,} tokens, {speed:,.0f} tokens/s", soft_wrap=True)

    _log_to(evaluation.output / LOG)
    with ray_runtime(config.cluster, config.hardware.accelerator):
        # Workers may have another current directory.
        config.model.path = absolute_path(config.model.path)
        totals = evaluate(evaluation, progress)
    results = results_of(evaluation, totals.scores)
    path = write_results(evaluation, totals, results, examined.machine, started)
    (shown if shown.is_terminal else Console(width=160)).print(table_of(results))
    if totals.failed:
        shown.print(f"{totals.failed} scores failed and count as wrong", soft_wrap=True)
    shown.print(f"{path} after {time.perf_counter() - begin:.0f} s", soft_wrap=True)


def _asked(prompts: "PromptSets", options: argparse.Namespace) -> "list[Prompt]":
    """Return the prompts to evaluate."""
    half = prompts.train if options.split == "train" else prompts.held_out
    if options.problems is not None and options.problems > len(half):
        raise UsageError(
            f"--problems {options.problems}: expected at most {len(half)}, the problems of the "
            f"split {options.split} (data.num_eval_problems limits held_out).\n"
            "Lower --problems."
        )
    return half[: options.problems]


def _output_folder(output: Path | None, subject: Subject) -> Path:
    """Create the folder for the results; one of the user must be new or empty."""
    folder = output or Path("evals", subject.name, f"{datetime.now():%Y-%m-%d_%H-%M-%S}")
    if output and folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UsageError(
            f"--output {folder}: it exists and is not an empty folder.\nUse a new folder."
        )
    try:
        # New: not that of an evaluation begun in the same second.
        return claim(folder, is_new=output is None).folder
    except OSError as error:
        raise UsageError(f"--output {folder} cannot be made: {error.strerror}.") from error


def _headline(evaluation: "Evaluation") -> str:
    subject, config = evaluation.subject, evaluation.config
    temperature = f"temperature {evaluation.sampling['temperature']:g}"
    program = config.environment or config.agent
    return (
        f"{subject.folder or subject.model}: {len(evaluation.asked)} problems "
        f"({evaluation.split.value}), {evaluation.samples} samples each, "
        f"{'greedy' if evaluation.greedy else temperature}, "
        f"scored by {(program or config.reward).function}, into {evaluation.output}"
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
