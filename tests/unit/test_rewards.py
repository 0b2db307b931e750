"""GSM8K's reward: what counts as the final number; dotted paths: what is found, what is named."""

import sys
import time
from decimal import Decimal

import numpy as np
import pytest
import torch

from hybridrl.app.process import import_from_here
from hybridrl.config.errors import ConfigError
from hybridrl.config.user_code.classes import check_reward_function, locate
from hybridrl.config.user_code.importing import check_itself
from hybridrl.rewards.base import MAX_REWARD, Score, as_score
from hybridrl.rewards.gsm8k import last_number, reference_answer, score, strict_answer

EURO, MINUS = "\u20ac", "\u2212"
GOLD = {"answer": "Tom has 3 + 4 = <<3+4=7>>7 apples.\n7 * 6 = 42\n#### 42"}


@pytest.mark.parametrize(
    ("response", "strict", "flexible"),
    [
        ("7 * 6 = 42\n#### 42", 1.0, 1.0),
        ("7 * 6 = 42\n#### 42.\n\n", 1.0, 1.0),
        ("#### 42.00 apples", 1.0, 1.0),
        ("the answer is 42", 0.0, 1.0),
        ("the answer is 42.", 0.0, 1.0),
        ("#### 42\nthat is 2 more than 40", 0.0, 0.0),
        ("#### 42\nI am sure.", 0.0, 1.0),
        ("#### 41\n#### 42", 1.0, 1.0),
        ("#### 42\n#### 41", 0.0, 0.0),
        ("#### 41", 0.0, 0.0),
        ("#### -42", 0.0, 0.0),
        ("#### 4.2", 0.0, 0.0),
        ("#### 420", 0.0, 0.0),
        ("#### forty-two", 0.0, 0.0),
        ("42 ####", 0.0, 1.0),
        ("####", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_score(response, strict, flexible):
    assert score("6 * 7?", response, GOLD, mode="strict") == strict
    assert score("6 * 7?", response, GOLD, mode="flexible") == flexible
    assert score("6 * 7?", response, GOLD) == strict


@pytest.mark.parametrize(
    ("tail", "number"),
    [
        ("42", "42"),
        (" 42", "42"),
        ("\t042 \n", "42"),
        (" -3", "-3"),
        (f" {MINUS}3", "-3"),
        (" +3", "3"),
        (" 1,234,567.890", "1234567.89"),
        (" 1234567", "1234567"),
        (" .5", "0.5"),
        (" -.5", "-0.5"),
        (" $18", "18"),
        (" -$18.50.", "-18.5"),
        (" $-18.50", "-18.5"),
        (f" 18 {EURO}", "18"),
        (f" {EURO}18", "18"),
        (" 50%", "50"),
        (" 50 %.", "50"),
        (" 5 km/h", "5"),
        (" 5km/h.", "5"),
        (" 12 m^2", "12"),
        (" 12 square feet.", "12"),
        (" 60 miles per hour", "60"),
        ("# 42", "42"),  # five signs
    ],
)
def test_strict_answer_reads(tail, number):
    assert strict_answer(f"so it is 7\n####{tail}") == Decimal(number)


@pytest.mark.parametrize(
    "tail",
    [
        "",
        " ",
        "\n42",
        " x",
        " 42 or 43",
        " 42 43",
        " 42, 43",
        " 1,23",
        " 12,345678",
        " 1.5.2",
        " 42..",
        " 42!",
        " 42 = x",
        " 42 (apples)",
        " **42**",
        " - 42",
        " 42 apples that Tom ate",
        " 42\nSo the answer is right.",
        " 42 #",
        " NaN",
        " Infinity",
        " \u0664\u0662",  # digits of another script
    ],
)
def test_strict_answer_refuses(tail):
    assert strict_answer(f"so it is 7\n####{tail}") is None


def test_strict_answer_needs_the_marker():
    assert strict_answer("42") is None
    assert strict_answer("### 42") is None


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 apples and 4 pears", "4"),
        ("is 1,234.50 dollars", "1234.5"),
        ("costs $18.", "18"),
        ("owes -$5", "-5"),
        ("x=-5", "-5"),
        ("(-7)", "-7"),
        ("10-3", "3"),
        ("10 - 3", "3"),
        ("rows 2) -3", "-3"),
        ("5)-2", "2"),
        ("1,2,3", "3"),
        ("12,34", "34"),
        ("3/4", "4"),
        ("0.10", "0.1"),
        ("#### 42 and 7", "7"),
        ("#### 18 cm^2", "18"),
        ("it has 18 cm^2, or 18 cm^-2.", "18"),
        ("#### 18 km/h2", "18"),
        ("1,000,000", "1000000"),
        ("v1.2.3", "3"),
        ("15kg", "15"),
    ],
)
def test_last_number(text, number):
    assert last_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "none at all", "-", "$", ".,", "\u0664\u0662"])
def test_last_number_of_none(text):
    assert last_number(text) is None


def test_numbers_are_compared_exactly():
    third = "0.3333333333333333333333333333333333333333333333333"
    assert score("", f"#### {third}", {"answer": third}) == 1.0
    assert score("", f"#### {third}1", {"answer": third}) == 0.0
    assert score("", "#### -1" + "0" * 60 + "1", {"answer": "-1" + "0" * 61}) == 0.0
    assert score("", "#### 1.50", {"answer": "1.5"}) == 1.0
    assert score("", "#### 0.1", {"answer": "0.1000"}) == 1.0
    assert score("", "#### -0", {"answer": "0"}) == 1.0


@pytest.mark.parametrize(
    "answer", ["#### 42", "42", " 42 ", "42.0", "$42", "so\n#### 42", 42, 42.0]
)
def test_reference_answer_is_a_solution_or_a_number(answer):
    assert reference_answer(answer) == 42
    assert score("", "#### 42", {"answer": answer}) == 1.0


@pytest.mark.parametrize("answer", ["", "unknown", "41 or 42", "####", "so it is 42 ####", None])
def test_a_reference_without_number_raises(answer):
    with pytest.raises(ValueError, match=r"data\.answer_key"):
        score("", "#### 42", {"answer": answer})


def test_bad_calls_raise():
    with pytest.raises(KeyError, match="answer"):
        score("", "#### 42", {"solution": "42"})
    with pytest.raises(ValueError, match="lenient"):
        score("", "#### 42", GOLD, mode="lenient")


@pytest.mark.parametrize(
    "hostile",
    [
        "#### 1" + " " * 100_000 + "!",
        "#### 1 " + "a" * 100_000 + "!",
        "#### 1 a" + "/b" * 100_000 + "!",
        "#### " * 100_000,
        "1" * 200_000,
        "1,111" + ",111" * 50_000 + "1",
        "1," * 100_000,
        ".1" * 100_000,
    ],
)
def test_time_is_linear_in_the_response(hostile):
    start = time.perf_counter()
    strict_answer(hostile)
    last_number(hostile)
    assert time.perf_counter() - start < 1.0


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.int64(-3), -3.0),
        (np.bool_(True), 1.0),
        (np.array([[2.0]]), 2.0),
        (torch.tensor(0.25), 0.25),
        (torch.tensor(True), 1.0),
        (MAX_REWARD, MAX_REWARD),
    ],
)
def test_numbers_of_numpy_and_torch_are_rewards(value, number):
    assert as_score(value, "f") == Score(number, {})
    assert type(as_score(Score(value, {"part": value}), "f").parts["part"]) is float


@pytest.mark.parametrize(
    "value",
    ["1", b"1", [1.0], None, 1j, Decimal(1), np.array([1.0, 2.0]), torch.ones(2), torch.tensor(1j)],
)
def test_what_is_no_number_is_no_reward(value):
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        as_score(value, "f")


def test_no_reward_overflows_in_float32():
    """Sums over turns and squared deviations over a step of a million responses are finite."""
    of_turns = torch.tensor([MAX_REWARD, -MAX_REWARD]) * 1000
    assert bool((of_turns.square() * 5e5).sum().isfinite())
    for value in (1.01 * MAX_REWARD, 1e39, -1.7e308, 10**400, np.float64("inf"), float("nan")):
        with pytest.raises((ValueError, OverflowError)):
            as_score(value, "f")


def test_a_module_of_the_current_directory_is_found(tmp_path, monkeypatch):
    (tmp_path / "my_reward_here.py").write_text(
        "def score(_prompt, response, example):\n    return 0.25\n"
    )
    monkeypatch.chdir(tmp_path)
    # As a console script sees it: neither "" nor the current directory.
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    import_from_here()
    check_reward_function("reward", "my_reward_here.score", {})
    assert locate("reward.function", "my_reward_here.score")("", "", {}) == 0.25


@pytest.mark.parametrize(
    ("dotted", "names"),
    [
        ("no_such_module_at_all.score", "no_such_module_at_all"),
        ("hybridrl.rewards.no_such.score", r"hybridrl\.rewards\.no_such"),
        ("hybridrl.rewards.gsm8k.scoer", "has no scoer.*score"),
        ("hybridrl.rewards.gsm8k.MARKER", "MARKER, expected a function"),
        ("score", "dotted path"),
    ],
)
def test_what_is_wrong_with_a_function_is_named(dotted, names):
    with pytest.raises(ConfigError, match=names):
        check_reward_function("reward", dotted, {})


@pytest.mark.parametrize(
    "path",
    [
        "hybridrl.rewards.gsm8k.score",
        "hybridrl.environments.calculator.Calculator",
        "hybridrl.environments.calculator_agent.run",
    ],
)
def test_a_mode_that_does_not_exist_is_named_before_a_run(path):
    check_itself("key", path, locate("key", path), {"mode": "strict"})
    check_itself("key", path, locate("key", path), {})
    with pytest.raises(ConfigError, match=r"key\.args\.mode = lenient, expected one of strict, "):
        check_itself("key", path, locate("key", path), {"mode": "lenient"})


def test_the_refusal_tells_a_missing_import_of_the_users_module(tmp_path, monkeypatch):
    (tmp_path / "my_broken_reward.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"my_broken_reward failed.*no_such_dependency"):
        check_reward_function("reward", "my_broken_reward.score", {})
