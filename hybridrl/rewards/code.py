"""Reward for programs: runs the response's last Python block with the example's tests.

Programs run in the sandbox of hybridrl.rewards.sandbox.programs.
"""

import json
import math
import re
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

from hybridrl.rewards.base import (
    SECONDS,
    Rule,
    at_least,
    checked_by,
    one_of,
    section_problems,
    value_problems,
)
from hybridrl.rewards.sandbox.programs import (
    Case,
    Isolation,
    Limits,
    Outcome,
    SandboxError,
    run_tests,
)

FENCE = "```"
_LANGUAGE = re.compile(r"(?:py(?:thon)?[0-9.]*)?")


class Grading(StrEnum):
    """Reward as a function of test outcomes."""

    share = "share"
    all = "all"


_RULES: dict[str, Rule] = {
    "tests_key": ("the name of a column", lambda name: isinstance(name, str) and name != ""),
    "grading": one_of(Grading),
    "isolation": one_of(Isolation),
}
_LIMITS = {
    "seconds_per_test": SECONDS,
    "seconds": SECONDS,
    "memory_mb": at_least(64),
    "file_mb": at_least(1),
}


def _problems(key: str, args: dict[str, Any]) -> Iterator[str]:
    """Check the arguments, then the sandbox, by running two programs in it."""
    problems = [
        *value_problems(f"{key}.args", args, _RULES),
        *section_problems(f"{key}.args.limits", args["limits"], _LIMITS),
    ]
    yield from problems
    if problems:
        return
    cases = [Case(statements="assert x == 1"), Case(statements="assert x == 2")]
    try:
        outcomes = run_tests("x = 1", cases, Limits(**args["limits"]), Isolation(args["isolation"]))
        if outcomes != [Outcome.passed, Outcome.failed]:
            raise SandboxError(
                f"a correct and a wrong program got {', '.join(outcomes)}, expected passed, "
                f"failed; raise the limits if they are too small"
            )
    except SandboxError as error:
        yield (
            f"{key}.args.isolation = {args['isolation']}, but the sandbox does not work on this "
            f"machine: {error}.\n{_REMEDIES}"
        )


_REMEDIES = (
    "It needs Linux, user namespaces and the packages bubblewrap and libseccomp2: apt-get install "
    "bubblewrap libseccomp2. Or compute this reward on another machine: reward=http. Or run "
    "programs without a sandbox, with all your rights: reward.args.isolation=none."
)


@checked_by(_problems)
def score(
    prompt: str,
    response: str,
    example: dict[str, Any],
    tests_key: str,
    grading: str,
    isolation: str,
    limits: dict[str, Any],
) -> float:
    """Return the share of the example's tests that the response's last Python block passes.

    Args:
        prompt: not read.
        response: the program is its last closed block between ``` fences, marked python or
            unmarked; without one the score is 0.
        example: its column `tests_key` has the tests, in a format of `cases_of`.
        tests_key: name of the column.
        grading: share: the share of tests passed; all: 1 if all pass, else 0.
        isolation, limits: see hybridrl.rewards.sandbox.programs.

    Raises:
        KeyError: the example has no such column.
        ValueError: the column has no tests.
        SandboxError: the sandbox cannot be set up; the program was not run.
    """
    cases = cases_of(example[tests_key])
    program = last_python_block(response)
    if program is None:
        return 0.0
    only_all = Grading(grading) is Grading.all
    outcomes = run_tests(
        program, cases, Limits(**limits), Isolation(isolation), stop_at_failure=only_all
    )
    share = outcomes.count(Outcome.passed) / len(outcomes)
    return math.floor(share) if only_all else share


def last_python_block(text: str) -> str | None:
    """Return the last fenced block that is marked as Python; without one, the last unmarked.

    A marked fence always opens a block, whose lines lose its indentation. An unclosed block at the
    end, as in a truncated response, is ignored.
    """
    blocks: dict[bool, str] = {}  # the last one by whether it is marked
    language: str | None = None  # of the open block
    lines: list[str] = []
    indent = 0
    for line in text.split("\n"):
        mark = line.strip()
        blanks = len(line) - len(line.lstrip())
        if not mark.startswith(FENCE):
            lines.append(line[min(indent, blanks) :])
        elif language is not None and not mark.strip("`"):
            if _LANGUAGE.fullmatch(language):
                blocks[language != ""] = "\n".join(lines)
            language = None
        else:
            language, _, _ = mark.strip("`").strip().lower().partition(" ")
            lines, indent = [], blanks
    return blocks.get(True, blocks.get(False))


def cases_of(tests: Any) -> list[Case]:
    """Parse the tests of an example.

    Args:
        tests: a list of statements that raise if the program is wrong ("assert f(1) == 2", with
            access to the program's names) and of {"input": ..., "output": ...}, stdin and
            expected stdout of a script; {"inputs": [...], "outputs": [...]} for many of these; one
            text of statements; or any of these as JSON.

    Raises:
        ValueError: the format is none of these, or there are no tests.
    """
    if isinstance(tests, str) and tests.lstrip()[:1] in ("[", "{"):
        tests = json.loads(tests)
    match tests:
        case {"inputs": inputs, "outputs": outputs} if not tests.get("fn_name"):
            pairs = zip(inputs, outputs, strict=True)
            tests = [{"input": given, "output": wanted} for given, wanted in pairs]
    cases = [_case(test) for test in (tests if isinstance(tests, list) else [tests])]
    if not cases:
        raise ValueError("the example's list of tests is empty")
    return cases


def _case(test: Any) -> Case:
    match test:
        case str() if test.strip():
            return Case(statements=test)
        case {"input": str() as given, "output": str() as wanted} if (
            test.get("testtype") != "functional"  # arguments and result, as in LiveCodeBench
        ):
            return Case(stdin=given, stdout=wanted)
    raise ValueError(
        f"a test of the example is {str(test)[:80]!r}, expected statements such as "
        f"'assert f(1) == 2', or a script's (not a function's) input and output as texts"
    )
