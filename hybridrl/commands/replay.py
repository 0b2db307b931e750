"""`hybridrl replay`: repeat an update that was not finite, or the sampling of a response.

hybridrl replay <run>/replay/step_<n>           which responses make an update NaN or infinite?

Starts the workers of that run's config, loads the weights of that step, computes forward, loss and
gradients of that update, prints values that are not finite, and writes replay.json to the folder.
Updates no weights.

hybridrl replay <run> --step n --response k     is a recorded response sampled again?

Samples response k of rollouts/step_<n>.jsonl with the weights of the checkpoint of step n - 1, and
prints the first token that differs.

Exit codes: 0 everything is finite or the same, 1 failed, 2 the folder or the config is wrong,
3 something is not finite or differs, 129 SIGHUP, 130 Ctrl-C, 143 SIGTERM.
"""

import argparse
import logging
import sys
from pathlib import Path

from rich.console import Console

from hybridrl.commands.resample import resample
from hybridrl.commands.running import argument_parser, run_command
from hybridrl.config.checks.installation import check_ray

EXIT_NOT_FINITE = 3
# Width of the tables without a terminal.
WIDTH = 160


def main() -> None:
    """Run the command; exits by SystemExit unless everything is finite."""
    parser = argument_parser("replay", __doc__, None)
    parser.add_argument("folder", type=Path, help="folder named by the stopped run, or a run")
    parser.add_argument("--step", type=int, help="recorded step, from 1")
    parser.add_argument("--response", type=int, help="line of rollouts/step_<n>.jsonl, from 0")
    parser.add_argument(
        "--run-code", action="store_true", help="run user code named in the folder's config"
    )
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if (options.step is None) != (options.response is None):
        parser.error("--step and --response belong together")
    if options.step is None:
        run_command(lambda: _replay(options.folder, runs_code=options.run_code))
    else:
        run_command(lambda: _resample(options))


def _resample(options: argparse.Namespace) -> None:
    check_ray()
    arguments = (options.folder, options.step, options.response)
    same, finding = resample(*arguments, runs_code=options.run_code)
    Console(highlight=False, markup=False).print(finding, soft_wrap=True)
    if not same:
        sys.exit(EXIT_NOT_FINITE)


def _replay(folder: Path, *, runs_code: bool) -> None:
    check_ray()
    # Heavy imports follow the check of the command line.
    from hybridrl.controller.ray.runtime import ray_runtime
    from hybridrl.trainer.replay.nonfinite import read_replay
    from hybridrl.trainer.replay.session import replay, show, write_findings

    kept = read_replay(folder, runs_code=runs_code)
    with ray_runtime(kept.config.cluster, kept.config.hardware.accelerator):
        findings = replay(kept, folder)
    console = Console(highlight=False, markup=False)
    wide = Console(highlight=False, markup=False, width=WIDTH)
    show(console if console.is_terminal else wide, findings)
    path = write_findings(folder, findings)
    console.print(f"written to {path}", soft_wrap=True)
    if not findings.is_finite:
        sys.exit(EXIT_NOT_FINITE)
