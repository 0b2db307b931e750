"""Environments in processes of their own: state between turns, failures, the calculator."""

import pickle
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from hybridrl.config.errors import ConfigError
from hybridrl.environments.base import EnvironmentPool, StepRequest, StepResult
from hybridrl.environments.calculator import Calculator
from hybridrl.processes.messages import FailureKind
from hybridrl.processes.pool import ProcessesError

pytestmark = pytest.mark.full


def pool(name: str, *, timeout_s: float = 20.0, **args) -> EnvironmentPool:
    function = f"tests.support.environment_cases.{name}"
    return EnvironmentPool(function, args, timeout_s=timeout_s, num_processes=1)


@pytest.mark.parametrize("name", ["Counts", "make_counts"])
def test_an_environment_goes_on_where_it_was_left(name):
    with pool(name, turns=3) as environments:
        opened = environments.open([{"greeting": "hello"}, {"greeting": ""}])
        assert [reply.result.text for reply in opened] == ["hello", ""]
        first = environments.step([StepRequest(reply.state, "a") for reply in opened])
        assert first[0].result == StepResult("1:a", 1.0, False)
        second = environments.step(
            [StepRequest(first[0].state, "b"), StepRequest(first[1].state, "c")]
        )
        assert [reply.result.text for reply in second] == ["2:b", "2:c"]
        # copies of one state do not know of each other
        again = environments.step([StepRequest(first[0].state, "d")] * 2)
        assert [reply.result for reply in again] == [StepResult("2:d", 2.0, False)] * 2
        (last,) = environments.step([StepRequest(second[0].state, "e")])
        assert last.result == StepResult("3:e", 3.0, True) and last.failure is None


@pytest.fixture(scope="module")
def bad_manners() -> Iterator[EnvironmentPool]:
    with pool("Misbehaves", timeout_s=0.3) as environments:
        yield environments


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("raises", FailureKind.error),
        ("sleeps", FailureKind.timeout),
        ("dies", FailureKind.error),
        ("unpicklable", FailureKind.error),
        ("nan", FailureKind.error),
        ("text", FailureKind.error),
        ("tuple", FailureKind.error),
        ("number", FailureKind.error),
        ("one", FailureKind.error),
        ("large", FailureKind.error),
        ("low", FailureKind.error),
        ("raises_surrogate", FailureKind.error),
        ("garbles", FailureKind.error),
    ],
)
def test_a_step_that_fails_ends_its_own_conversation_only(bad_manners, text, kind):
    (opened,) = bad_manners.open([{}])
    good, bad, also_good = bad_manners.step([StepRequest(opened.state, t) for t in ("", text, "")])
    assert (bad.failure, bad.result) == (kind, StepResult("", 0.0, True))
    assert bad.reason.encode() and "\n" not in bad.reason
    for reply in (good, also_good):
        assert reply.failure is None and reply.result == StepResult("fine", 1.0, False)


def test_a_process_outlives_the_thread_in_which_another_one_died(bad_manners):
    (opened,) = bad_manners.open([{}])

    def step(*texts: str) -> str:
        return bad_manners.step([StepRequest(opened.state, t) for t in texts])[-1].result.text

    with ThreadPoolExecutor(1) as thread:
        process = thread.submit(step, "dies", "process").result()
    time.sleep(0.5)  # the kernel's signal would come now
    assert step("process") == process


def test_lone_surrogates_that_an_environment_says_are_written_out(bad_manners):
    (opened,) = bad_manners.open([{"greeting": "\udc00"}])
    assert opened.result.text == r"\udc00"
    (reply,) = bad_manners.step([StepRequest(opened.state, "surrogate")])
    assert reply.result == StepResult("caf\\ud800 \U0001f600", 1.0, False)


def test_an_environment_that_does_not_begin_has_failed(bad_manners):
    replies = bad_manners.open([{}, {"fails": "init"}, {"fails": "reset"}])
    assert [reply.failure for reply in replies] == [None, FailureKind.error, FailureKind.error]
    assert [reply.result.done for reply in replies] == [False, True, True]


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("NoStep", "has no step"),
        ("NOT_CALLABLE", "is a int, expected a class"),
        ("Missing", "has no Missing"),
    ],
)
def test_what_makes_no_environment_is_named(name, names):
    with pytest.raises(ConfigError, match=names):
        pool(name)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import no_such_dependency", "^environment processes cannot start"),
        ("import os; os._exit(5)", "environment processes in a row ended"),
    ],
)
def test_an_environment_that_processes_cannot_import_is_called_one(
    tmp_path, monkeypatch, source, says
):
    """It was there when this process looked, and is `source` afterwards."""
    module = tmp_path / "fleeting_environment.py"
    module.write_text("from tests.support.environment_cases import Counts\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, module.stem, raising=False)
    __import__(module.stem)
    module.write_text(source)
    with (
        EnvironmentPool(f"{module.stem}.Counts", {}, timeout_s=1.0, num_processes=1) as broken,
        pytest.raises(ProcessesError, match=says),
    ):
        broken.open([{}])


def conversation(*turns: str, answer: str = "#### 17", mode: str = "strict") -> list[StepResult]:
    calculator = Calculator({"answer": answer}, mode)
    assert calculator.reset() == ""
    results = []
    for turn in turns:
        calculator = pickle.loads(pickle.dumps(calculator))
        results.append(calculator.step(turn))
    return results


def test_the_calculator_computes_until_it_is_asked_no_more():
    assert conversation("16 + 4 =", "20 - 3 =", "#### 17") == [
        StepResult(" 20\n", 0.0, False),
        StepResult(" 17\n", 0.0, False),
        StepResult("", 1.0, True),
    ]


def test_its_reward_is_of_the_whole_conversation():
    """Here the answer is the calculator's own last word."""
    assert conversation("####", answer="4")[-1] == StepResult("", 0.0, True)
    assert conversation("#### 2 + 2 =", "", answer="4", mode="flexible")[-1].reward == 1.0
    assert conversation("#### 2 + 2 =", "", answer="4")[-1].reward == 0.0
    assert conversation("2 + 2 =", "#### 5", answer="4")[-1].reward == 0.0


@pytest.mark.parametrize("text", ["=", "a =", "3 / 0 =", "3 + =", "1,000 + 1 ="])
def test_what_cannot_be_computed_gets_a_question_mark(text):
    assert conversation(text) == [StepResult(" ?\n", 0.0, False)]


def test_only_the_last_line_is_computed_and_spaces_do_not_matter():
    assert conversation("Then 5\n2 + 2 = ")[0].text == " 4\n"
    assert conversation("5 = 5")[0].done
