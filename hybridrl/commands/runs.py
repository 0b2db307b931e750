"""`hybridrl runs`: a table of the runs in a folder."""

import sys
from pathlib import Path

from hybridrl.app.runs import RunOnDisk, accuracy_text, find_runs, progress, state_of
from hybridrl.commands.running import UsageError, argument, parsed, run_command

# Where runs and jobs of sweeps are unless hydra.run.dir or hydra.sweep.dir says otherwise.
FOLDERS = [Path("outputs"), Path("multirun")]

DESCRIPTION = """\
List runs, newest start first: name, start, step, accuracy, state and path.

  hybridrl runs              those in outputs/ and multirun/
  hybridrl runs FOLDER ...   those in other folders

The accuracy is that of the last evaluation on held-out problems, with its 95 % interval.
States: running; finished; stopped (Ctrl-C, SIGTERM, SIGHUP); failed (its log says why); killed
(it ended without a word: SIGKILL, no memory left, power cut); unknown (started on another machine,
and nothing here says how it ended).
"""


def main() -> None:
    """Run the command; exits by SystemExit unless all goes well."""
    folders = argument("folders", nargs="*", type=Path, metavar="FOLDER", help="(outputs multirun)")
    args = parsed("runs", DESCRIPTION, folders)
    run_command(lambda: list_runs(args.folders))


def list_runs(folders: list[Path]) -> None:
    """Print the table; UsageError if a folder does not exist or there are no runs."""
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"{folder}: there is no such folder (seen from {Path.cwd()}).")
    runs = find_runs(folders or FOLDERS)
    if not runs:
        where = " and ".join(f"{folder}/" for folder in folders or FOLDERS)
        raise UsageError(
            f"no runs in {where} (seen from {Path.cwd()}).\n"
            f"Name the folder they are in: hybridrl runs FOLDER"
        )
    sys.stdout.write("\n".join(table(runs)) + "\n")


def table(runs: list[RunOnDisk]) -> list[str]:
    """Return the lines of the table, never cut or folded: paths are copied from them."""
    rows = [("name", "started", "step", "accuracy", "state", "path")]
    for run in runs:
        numbers = progress(run.folder)
        step = "-" if numbers.step is None else numbers.step
        rows.append(
            (
                run.name,
                run.started.astimezone().strftime("%Y-%m-%d %H:%M:%S"),
                f"{step} of {run.total_steps}",
                accuracy_text(numbers.accuracy, numbers.ci95),
                state_of(run),
                str(run.folder),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
