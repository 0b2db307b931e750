"""`hybridrl report`: one HTML file of one or more runs, or of a sweep."""

import sys
from pathlib import Path

from hybridrl.commands.running import UsageError, argument, parsed, run_command
from hybridrl.report.page import find_folders, write_report
from hybridrl.trainer.tracking.tracker import REPORT_FILE

DESCRIPTION = """\
Write one HTML file about runs: settings, results, curves, responses, tokens, timeline. It opens in
a browser without a network. A run may still go on, or have failed.

  hybridrl report outputs/x/date              writes outputs/x/date/report.html
  hybridrl report multirun/x/date             all jobs of a sweep, compared
  hybridrl report RUN RUN -o compared.html    several runs in the same curves

docs/report.md says how to read it.
"""


def main() -> None:
    """Run the command; exits by SystemExit unless all goes well."""
    args = parsed(
        "report",
        DESCRIPTION,
        argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of runs or a sweep"),
        argument("-o", "--output", type=Path, metavar="FILE", help="(RUN/report.html, or here)"),
    )
    run_command(lambda: report(args.runs, args.output))


def report(paths: list[Path], output: Path | None) -> None:
    """Write the report and print its path; UsageError if a path has no run."""
    for path in paths:
        if not find_folders([path]):
            raise UsageError(
                f"{path}: there is no run in this folder (seen from {Path.cwd()}).\n"
                f"hybridrl runs lists runs with their folders."
            )
    output = output or (paths[0] if len(paths) == 1 else Path()) / REPORT_FILE
    # It is replaced by another file, as a device or a folder must not be.
    if output.exists() and not output.is_file():
        raise UsageError(f"-o {output} is no ordinary file.\nName another one.")
    try:
        write_report(find_folders(paths), output)
    except OSError as error:
        raise UsageError(f"{output} cannot be written: {error}.\nName another with -o.") from error
    sys.stdout.write(f"{output}, {output.stat().st_size / 1e6:.1f} MB\n")
