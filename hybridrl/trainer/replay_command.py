"""`hybridrl replay <run>/replay/step_<n>`: which responses make an update NaN or infinite?

Starts the workers of that run's config, loads the weights that met the batch, computes forward,
loss and gradients of exactly that update, prints what is not finite, and writes replay.json into
the folder. Takes no step.

Exit codes: 0 everything is finite, 1 something is not, 2 the folder or the config is wrong.
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from hybridrl.config.errors import ConfigError
from hybridrl.controller.errors import WorkerError
from hybridrl.controller.output import guard_standard_output

EXIT_NOT_FINITE, EXIT_USAGE = 1, 2
# Of the tables, where the output is no terminal.
WIDTH = 160


def main(argv: Sequence[str] | None = None) -> None:
    """The command; leaves by SystemExit."""
    parser = argparse.ArgumentParser(
        prog="hybridrl replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="what a stopped run has named")
    parser.add_argument(
        "--run-code", action="store_true", help="of others that the folder's config names"
    )
    options = parser.parse_args(sys.argv[1:] if argv is None else argv)
    if argv is None:
        guard_standard_output()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if os.getcwd() not in sys.path:  # losses and workers of the user's
        sys.path.insert(0, os.getcwd())
    try:
        sys.exit(_replay(options.folder, runs_code=options.run_code))
    except ConfigError as error:
        sys.stderr.write(f"ConfigError: {error}\n")
        sys.exit(EXIT_USAGE)
    except WorkerError as error:  # nothing was found out
        sys.stderr.write(f"{error}\n")
        sys.exit(EXIT_USAGE)


def _replay(folder: Path, *, runs_code: bool) -> int:
    # Heavy imports come only when the command line is known to be right.
    from hybridrl.controller.ray_runtime import ray_runtime
    from hybridrl.trainer.replay import replay, show, write_findings
    from hybridrl.trainer.replay_batch import read_replay

    kept = read_replay(folder, runs_code=runs_code)
    with ray_runtime(kept.config.cluster, kept.config.hardware.accelerator):
        findings = replay(kept, folder)
    console = Console(highlight=False)
    show(console if console.is_terminal else Console(highlight=False, width=WIDTH), findings)
    path = write_findings(folder, findings)
    console.print(f"written to {path}", soft_wrap=True)
    return 0 if findings.is_finite else EXIT_NOT_FINITE
