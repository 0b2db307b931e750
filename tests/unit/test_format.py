"""Rewards for a response's form: what matches, bad patterns, patterns that explode."""

import time

import pytest

from hybridrl.config.errors import ConfigError
from hybridrl.config.user_code.classes import check_reward_function
from hybridrl.processes.messages import FailureKind
from hybridrl.rewards.format import gsm8k_answer, matches
from tests.support.scorers import reward_scorer

MATCHES = "hybridrl.rewards.format.matches"
TAGS = r"(?s)\s*<think>.*?</think>\s*<answer>.*?</answer>\s*"


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<think>2\n+ 2</think>\n<answer>4</answer>\n", 1.0),
        ("<think></think><answer></answer>", 1.0),
        ("so <think>2 + 2</think><answer>4</answer>", 0.0),
        ("<think>2 + 2</think><answer>4</answer> I am sure", 0.0),
        ("<answer>4</answer><think>2 + 2</think>", 0.0),
        ("<think>2 + 2", 0.0),
        ("", 0.0),
    ],
)
def test_the_whole_response_must_match(response, expected):
    assert matches("prompt", response, {}, pattern=TAGS) == expected


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("6 * 7 = 42\n#### 42", 1.0),
        ("#### 41", 1.0),
        ("#### $1,234.50.", 1.0),
        ("42", 0.0),
        ("#### forty-two", 0.0),
        ("#### 42\nI am sure.", 0.0),
        ("", 0.0),
    ],
)
def test_gsm8k_answer_is_about_the_form_alone(response, expected):
    assert gsm8k_answer("prompt", response, {"answer": "#### 42"}) == expected


@pytest.mark.parametrize("pattern", ["(", "a{99999999999999999999}", "*", 3, None, ["a"]])
def test_a_bad_pattern_is_named_before_a_run(pattern):
    with pytest.raises(ConfigError, match=r"reward\.args\.pattern = .*regular expression"):
        check_reward_function("reward", MATCHES, {"pattern": pattern})


def test_a_good_pattern_passes():
    check_reward_function("reward", MATCHES, {"pattern": TAGS})


def test_a_catastrophic_pattern_is_cut_off_and_the_rest_is_scored():
    """(a+)+b needs time exponential in the number of a's: 2**60 ways, some 10**10 years."""
    start = time.monotonic()
    with reward_scorer(
        MATCHES, {"pattern": "(a+)+b"}, timeout_s=0.3, num_processes=1, failed_score=-1.0
    ) as scorer:
        result = scorer.score([("", text, {}) for text in ("aab", "a" * 60, "b")])
    assert result.scores == [1.0, -1.0, 0.0]
    assert [failure.kind for failure in result.failures] == [FailureKind.timeout]
    assert "killed" not in result.failures[0].reason  # interrupted: its process lives on
    assert time.monotonic() - start < 20


def test_a_possessive_pattern_takes_linear_time():
    start = time.perf_counter()
    assert matches("", "a" * 100_000, {}, pattern="(a++)+b") == 0.0
    assert time.perf_counter() - start < 5.0
