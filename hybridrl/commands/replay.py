"""`hybridrl replay`: repeat an update that was not finite."""

import logging
import sys
from pathlib import Path

from rich.console import Console

from hybridrl.commands.running import RUN_CODE, argument, parsed, run_command
from hybridrl.config.checks.installation import check_ray

DESCRIPTION = """\
Find the responses that make an update NaN or infinite.

  hybridrl replay <run>/replay/step_<n>      the folder that the stopped run names

Starts the workers of that run's config, loads the weights of that step, computes forward, loss and
gradients of that update, prints values that are not finite, and writes replay.json to the folder.
Updates no weights.
"""
EPILOG = """\
Exit codes: 0 everything is finite, 1 failed, 2 the folder or the config is wrong,
3 something is not finite, 129 SIGHUP, 130 Ctrl-C, 143 SIGTERM.
"""
EXIT_NOT_FINITE = 3
# Width of the tables without a terminal.
WIDTH = 160


def main() -> None:
    """Run the command; exits by SystemExit unless everything is finite."""
    folder = argument("folder", type=Path, help="folder named by the stopped run")
    options = parsed("replay", DESCRIPTION, folder, RUN_CODE, epilog=EPILOG)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run_command(lambda: _replay(options.folder, runs_code=options.run_code))


def _replay(folder: Path, *, runs_code: bool) -> None:
    check_ray()
    # Heavy imports follow the check of the command line.
    from hybridrl.controller.ray.runtime import ray_runtime
    from hybridrl.replay.session import read_replay, replay, show, write_findings

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
