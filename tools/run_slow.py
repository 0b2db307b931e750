"""Runs the tests that are too long for `make test`, one function at a time; keeps what passed.

Each outcome is written to tests/.slow/ as soon as it is known, so an interrupted run goes
on where it was: what has passed on this commit is not run again. At the end, tests/SLOW.md gets
the table of the last results. Arguments are passed on to pytest (e.g. `-k tiny`).
"""

import datetime
import json
import platform
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STATE = ROOT / "tests" / ".slow" / "results.json"
TABLE = ROOT / "tests" / "SLOW.md"
# Run whole, also what `make test` runs of it: a list of faults is to be complete.
WHOLE = "tests/runs/test_faults.py"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """The command's result, its output kept."""
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def slow_tests(extra: list[str]) -> list[str]:
    """Test functions with cases marked slow, and all of the file that is run whole."""
    pytest = (sys.executable, "-m", "pytest", "--collect-only", "-q", *extra)
    listed = [run(*pytest, "tests", "-m", "slow"), run(*pytest, WHOLE)]
    cases = [line for found in listed for line in found.stdout.splitlines() if "::" in line]
    names = list(dict.fromkeys(case.partition("[")[0] for case in cases))
    if not names:
        sys.exit("".join(found.stdout + found.stderr for found in listed))
    return names


def selection(name: str) -> list[str]:
    """Which cases of a test function are run."""
    return [] if name.startswith(WHOLE) else ["-m", "slow"]


def main() -> int:
    """Run what has not passed on this commit; return 0 if everything has."""
    commit = run("git", "rev-parse", "--short", "HEAD").stdout.strip()
    state = json.loads(STATE.read_text()) if STATE.exists() else {}
    if state.get("commit") != commit:
        state = {"commit": commit, "results": {}}
    names = slow_tests(sys.argv[1:])
    for name in names:
        if state["results"].get(name, {}).get("outcome") == "passed":
            print(f"passed before  {name}")
            continue
        start = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-q", "-rs", "--timeout", "3600", name]
        result = subprocess.run([*command, *selection(name)], cwd=ROOT)
        outcome = "passed" if result.returncode == 0 else "failed"
        seconds = round(time.monotonic() - start)
        state["results"][name] = {"outcome": outcome, "seconds": seconds}
        STATE.parent.mkdir(exist_ok=True)
        STATE.write_text(json.dumps(state, indent=1))
        print(f"{outcome}  {seconds} s  {name}", flush=True)
    write_table(state)
    return int(any(state["results"][name]["outcome"] != "passed" for name in names))


def write_table(state: dict) -> None:
    """tests/SLOW.md: the last results, with commit, date and machine."""
    rows = [
        f"| `{name}` | {row['outcome']} | {row['seconds']} |"
        for name, row in sorted(state["results"].items())
    ]
    TABLE.write_text(
        "# Last run of `make test_slow`\n\n"
        f"Commit {state['commit']}, {datetime.date.today()}, {platform.machine()}, "
        f"Python {platform.python_version()}.\n\n"
        "| test | result | seconds |\n|---|---|---|\n" + "\n".join(rows) + "\n"
    )


if __name__ == "__main__":
    sys.exit(main())
