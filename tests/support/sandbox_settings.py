"""What the tests of the sandbox and of the code reward share."""

import pytest

from hybridrl.rewards.sandbox.programs import (
    Case,
    Isolation,
    Limits,
    Outcome,
    SandboxError,
    run_tests,
)

LIMITS = Limits(seconds_per_test=0.5, seconds=5.0, memory_mb=256, file_mb=2)


def missing(isolation: Isolation) -> str:
    """Why an isolation is not to be had here; "" if it is."""
    try:
        run_tests("", [Case(statements="")], LIMITS, isolation)
    except SandboxError as error:
        return str(error)
    return ""


def needs(isolation: Isolation) -> pytest.MarkDecorator:
    reason = missing(isolation)
    return pytest.mark.skipif(bool(reason), reason=reason or "it is here")


in_bubblewrap = needs(Isolation.bubblewrap)
BOTH = [pytest.param(Isolation.bubblewrap, marks=in_bubblewrap), Isolation.none]
both = pytest.mark.parametrize("isolation", BOTH)


def outcome(program: str, isolation: Isolation, statements: str = "", **changes) -> Outcome:
    """How a program does in one test of statements."""
    limits = Limits(**(vars(LIMITS) | changes))
    (found,) = run_tests(program, [Case(statements=statements)], limits, isolation)
    return found
