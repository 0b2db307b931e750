"""Runs the tests that are too long for `make test`, file by file; keeps what passed.

The outcome of each test function is kept in tests/.slow/ when its file ends, so an interrupted run
goes on where it was: what has passed on this commit is not run again. At the end, tests/SLOW.md
gets the table of the last results. Arguments are passed on to pytest (e.g. `-k tiny`).
"""

import datetime
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TypedDict
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
STATE = ROOT / "tests" / ".slow" / "results.json"
TABLE = ROOT / "tests" / "SLOW.md"
# Run whole, also what `make test` runs of it: a list of faults is to be complete.
WHOLE = "tests/runs/test_faults.py"


class Result(TypedDict):
    """Outcome and seconds of all cases of a test function, with the fixtures that it built."""

    outcome: str
    seconds: float


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """The command's result, its output kept."""
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def slow_tests(extra: list[str]) -> dict[str, list[str]]:
    """Test functions with cases marked slow, by their file; all of the file that is run whole."""
    pytest = (sys.executable, "-m", "pytest", "--collect-only", "-q", *extra)
    listed = [run(*pytest, "tests", "-m", "slow"), run(*pytest, WHOLE)]
    cases = [line for done in listed for line in done.stdout.splitlines() if "::" in line]
    if not cases:
        sys.exit("".join(done.stdout + done.stderr for done in listed))
    files: dict[str, list[str]] = {}
    for name in dict.fromkeys(case.partition("[")[0] for case in cases):
        files.setdefault(name.partition("::")[0], []).append(name)
    return files


def results_of(file: str, names: list[str]) -> dict[str, Result]:
    """Run some functions of a file in one process, which builds the file's fixtures once."""
    results: dict[str, Result] = {name: {"outcome": "failed", "seconds": 0.0} for name in names}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-rs", "--timeout", "3600"]
        command += ["-o", "junit_family=xunit1", f"--junit-xml={report}"]
        subprocess.run([*command, *names, *([] if file == WHOLE else ["-m", "slow"])], cwd=ROOT)
        if not report.exists():  # the process died
            return results
        cases = list(ElementTree.parse(report).iter("testcase"))
    for name in names:
        own = [
            case
            for case in cases
            if case.get("name", "").partition("[")[0] == name[len(file) + 2 :]
        ]
        bad = [kind for case in own for kind in ("failure", "error") if case.find(kind) is not None]
        seconds = sum(float(case.get("time", 0)) for case in own)
        results[name] = {"outcome": "failed" if bad or not own else "passed", "seconds": seconds}
    return results


def main() -> int:
    """Run what has not passed on this commit; return 0 if everything has."""
    commit = run("git", "rev-parse", "--short", "HEAD").stdout.strip()
    state = json.loads(STATE.read_text()) if STATE.exists() else {}
    if state.get("commit") != commit:
        state = {"commit": commit, "results": {}}
    results: dict[str, Result] = state["results"]
    files = slow_tests(sys.argv[1:])
    for file, names in files.items():
        passed = {
            name for name in names if name in results and results[name]["outcome"] == "passed"
        }
        left = [name for name in names if name not in passed]
        print(f"{file}: {len(passed)} passed before, {len(left)} to run", flush=True)
        if left:
            results |= results_of(file, left)
            STATE.parent.mkdir(exist_ok=True)
            STATE.write_text(json.dumps(state, indent=1))
    write_table(state)
    everything = [name for names in files.values() for name in names]
    return int(not all(has_passed(results[name]) for name in everything))


def has_passed(result: Result | None) -> bool:
    """True for a function all of whose cases passed."""
    return result is not None and result["outcome"] == "passed"


def write_table(state: dict) -> None:
    """tests/SLOW.md: the last results, with commit, date and machine."""
    rows = [
        f"| `{name}` | {row['outcome']} | {row['seconds']:.0f} |"
        for name, row in sorted(state["results"].items())
    ]
    total = sum(row["seconds"] for row in state["results"].values()) / 60
    TABLE.write_text(
        "# Last run of `make test_slow`\n\n"
        f"Commit {state['commit']}, {datetime.date.today()}, {platform.machine()}, "
        f"Python {platform.python_version()}; {total:.0f} minutes.\n\n"
        "| test | result | seconds |\n|---|---|---|\n" + "\n".join(rows) + "\n"
    )


if __name__ == "__main__":
    sys.exit(main())
