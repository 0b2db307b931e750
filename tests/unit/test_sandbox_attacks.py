"""Attacks on what is outside of a program's sandbox, as root and as another user.

Each must fail in bubblewrap and leave its victim as it was; those that can do no harm must work
without it, or they would show nothing.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.sandbox_attacks import ATTACKS, REPO, WORK_OUTSIDE
from tests.support.sandbox_settings import in_bubblewrap

pytestmark = pytest.mark.full

SCRIPT = REPO / "tests" / "support" / "sandbox_attacks.py"
ANOTHER = 54321
AS_ANOTHER = (
    f"import os, sys; os.setgroups([]); os.setgid({ANOTHER}); os.setuid({ANOTHER}); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="root alone can be two users")
USERS = [pytest.param("root", marks=as_root), pytest.param("user")]


def for_another(command: list[str]) -> list[str]:
    """Run a command of root's as another user, who sees Python and this repository."""
    paths = [Path(path) for path in (sys.base_prefix, sys.prefix, REPO)]
    hidden = {
        folder
        for path in paths
        for folder in (path, *path.parents)
        if not folder.stat().st_mode & 0o001
    }
    options = ["--dev-bind", "/", "/"]
    for folder in sorted(hidden):
        options += ["--tmpfs", str(folder)]
    for path in paths:
        options += ["--dir", str(path.parent), "--ro-bind", str(path), str(path)]
    return ["bwrap", *options, sys.executable, "-c", AS_ANOTHER, *command]


@functools.cache
def report(user: str, isolation: str) -> dict:
    """Make all attacks as a user: the outcome of each, and what they harmed."""
    command = [sys.executable, str(SCRIPT), isolation]
    if user == "user" and os.geteuid() == 0:
        command = for_another(command)
    environment = os.environ | {"PYTHONPATH": str(REPO), "TMPDIR": "/tmp", "TOKEN": "s3cret"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@in_bubblewrap
@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_fails(user, attack):
    assert report(user, "bubblewrap")["outcomes"][attack] == "passed"


@in_bubblewrap
@pytest.mark.parametrize("user", USERS)
def test_nothing_outside_is_harmed(user):
    assert report(user, "bubblewrap")["harmed"] == []


@in_bubblewrap
@pytest.mark.parametrize("user", USERS)
def test_attacks_that_can_do_no_harm_work_without_a_sandbox(user):
    found = report(user, "none")
    assert [name for name, outcome in found["outcomes"].items() if outcome == "passed"] == []
    assert set(found["outcomes"]) == {name for group in WORK_OUTSIDE for name in group}
    assert {"process", "file", "fifo", "terminal", "sockets", "limit"} <= set(found["harmed"])
