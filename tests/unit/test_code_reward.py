"""The code reward: which block is run, tests in every form, grades, checks before a run."""

import json

import pytest

from hybridrl.config.errors import ConfigError
from hybridrl.config.user_code.classes import check_reward_function
from hybridrl.processes.messages import FailureKind
from hybridrl.rewards.code import cases_of, last_python_block, score
from hybridrl.rewards.sandbox.programs import Case
from tests.support.sandbox_settings import BOTH, in_bubblewrap
from tests.support.scorers import reward_scorer

pytestmark = pytest.mark.full

SCORE = "hybridrl.rewards.code.score"
LIMITS = {"seconds_per_test": 1.0, "seconds": 5.0, "memory_mb": 256, "file_mb": 2}
TESTS = ["assert f(1) == 2", "assert f(2) == 3", "assert f(-1) == 0", "assert f(0.5) == 1.5"]
RIGHT = "I add one.\n```python\ndef f(x):\n    return x + 1\n```\nThat is it."
HALF = "```python\ndef f(x):\n    return abs(x) + 1 if x != 0.5 else 0\n```"
WRONG = "```python\ndef f(x):\n    return x\n```"


def settings(**changes) -> dict:
    args = {"tests_key": "tests", "grading": "share", "isolation": "bubblewrap", "limits": LIMITS}
    return args | changes


def graded(response: str, tests: object, **changes) -> float:
    return score("prompt", response, {"tests": tests}, **settings(**changes))


@pytest.mark.parametrize("isolation", BOTH)
def test_grades(isolation):
    args = {"isolation": str(isolation)}
    assert graded(RIGHT, TESTS, **args) == 1.0
    assert graded(HALF, TESTS, **args) == 0.5
    assert graded(WRONG, TESTS, **args) == 0.0
    assert graded("I do not know.", TESTS, **args) == 0.0
    assert graded(RIGHT, TESTS, grading="all", **args) == 1.0
    assert graded(HALF, TESTS, grading="all", **args) == 0.0


@in_bubblewrap
@pytest.mark.parametrize(
    "tests",
    [
        [{"input": "1\n", "output": "2\n"}, {"input": "5", "output": "6"}],
        {"inputs": ["1\n", "5"], "outputs": ["2\n", "6"], "fn_name": None},
        json.dumps([{"input": "1\n", "output": "2\n", "testtype": "stdin"}]),
        json.dumps({"inputs": ["1"], "outputs": ["2"]}),
    ],
)
def test_scripts_are_judged_by_what_they_print(tests):
    assert graded("```\nprint(int(input()) + 1)\n```", tests) == 1.0
    assert graded("```\nprint(int(input()) + 2)\n```", tests) == 0.0


@pytest.mark.parametrize(
    ("tests", "cases"),
    [
        ("assert f(1) == 2", [Case(statements="assert f(1) == 2")]),
        (["assert a", "assert b"], [Case(statements="assert a"), Case(statements="assert b")]),
        ('["assert a"]', [Case(statements="assert a")]),
        ([{"input": "", "output": "2"}], [Case(stdin="", stdout="2")]),
        (
            [{"input": "1", "output": "2"}, "assert a"],
            [Case(stdin="1", stdout="2"), Case(statements="assert a")],
        ),
    ],
)
def test_forms_of_tests(tests, cases):
    assert cases_of(tests) == cases


@pytest.mark.parametrize(
    "tests",
    [
        "",
        "  ",
        [],
        None,
        3,
        [""],
        [{"input": "1"}],
        [{"input": 1, "output": 2}],
        {"inputs": ["1"], "outputs": []},
        {"inputs": ["1"], "outputs": ["2"], "fn_name": "f"},
        [{"input": "1", "output": "2", "testtype": "functional"}],
        "[",
        '["a", 3]',
    ],
)
def test_no_tests_are_an_error_not_a_score(tests):
    with pytest.raises(ValueError):
        graded(RIGHT, tests)


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("```python\na\n```", "a"),
        ("```\na\n```", "a"),
        ("```py\na\n\n b\n```\n", "a\n\n b"),
        ("``` Python3 \na\n  ```", "a"),
        ("```python\na\n```\nor\n```python\nb\n```", "b"),
        ("```python\na\n```\n```bash\nls\n```", "a"),
        ("```python\na\n```\n```\nb\n```", "a"),
        ("```\na\n```\n```\nb\n```\n```bash\nls\n```", "b"),
        ("```py3\na\n```", "a"),
        ("```python3.10\na\n````\nprose", "a"),
        ("```python\na\n```\n```python\nb", "a"),
        ("```python\na\n```python\nb\n```", "b"),
        ("1. So:\n   ```python\n   def f():\n       a\n   ```", "def f():\n    a"),
        ('```python title="a.py"\na\n```', "a"),
        ("```python\n```", ""),
        ("```python\na", None),
        ("```bash\nls\n```", None),
        ("a = 1", None),
        ("", None),
        ("```", None),
        ("a `b` c", None),
    ],
)
def test_last_python_block(text, block):
    assert last_python_block(text) == block


@in_bubblewrap
def test_failures_are_the_examples_and_programs_never_fail_a_reward():
    """Through reward processes; a program that does not end is cut off with what it started."""
    endless = "```python\nwhile True: pass\n```"
    args = settings(limits=LIMITS | {"seconds_per_test": 30.0, "seconds": 30.0})
    items = [(RIGHT, TESTS), (endless, TESTS), (WRONG, TESTS), (RIGHT, []), (HALF, TESTS)]
    with reward_scorer(SCORE, args, timeout_s=1.0, num_processes=1, failed_score=-1.0) as scorer:
        result = scorer.score([("", response, {"tests": tests}) for response, tests in items])
    assert result.scores == [1.0, -1.0, 0.0, -1.0, 0.5]
    assert [failure.kind for failure in result.failures] == [FailureKind.timeout, FailureKind.error]
    assert "list of tests is empty" in result.failures[1].reason


@in_bubblewrap
def test_good_settings_pass():
    check_reward_function("reward", SCORE, settings())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"grading": "some"}, ["r.args.grading = some", "share, all"]),
        ({"isolation": "filter"}, ["r.args.isolation = filter", "bubblewrap, none"]),
        ({"isolation": None}, ["r.args.isolation = None", "bubblewrap, none"]),
        ({"tests_key": None}, ["r.args.tests_key = None", "column"]),
        ({"limits": 3}, ["r.args.limits = 3", "seconds_per_test, seconds, memory_mb, file_mb"]),
        ({"limits": LIMITS | {"seconds": 0}}, ["r.args.limits.seconds = 0", "above 0"]),
        ({"limits": LIMITS | {"memory_mb": 1.5}}, ["r.args.limits.memory_mb = 1.5", "integer"]),
        ({"limits": LIMITS | {"memory_mb": 8}}, ["r.args.limits.memory_mb = 8", "at least 64"]),
        ({"limits": LIMITS | {"file_mb": True}}, ["r.args.limits.file_mb = True"]),
        (
            {"limits": LIMITS | {"second": 3}},
            ["r.args.limits.second = 3", "Did you mean r.args.limits.seconds"],
        ),
        (
            {"limits": {name: value for name, value in LIMITS.items() if name != "seconds"}},
            ["r.args.limits.seconds is missing"],
        ),
    ],
)
def test_bad_settings_are_named_before_a_run(changes, words):
    with pytest.raises(ConfigError) as caught:
        check_reward_function("r", SCORE, settings(**changes))
    (problem,) = caught.value.texts
    assert [word for word in words if word not in problem] == []
