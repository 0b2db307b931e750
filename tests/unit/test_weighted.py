"""Weighted sums of rewards: sums by hand, parts through real reward processes, their checks."""

import pytest

from hybridrl.config.errors import ConfigError
from hybridrl.config.user_code.classes import check_reward_function
from hybridrl.rewards.base import Score
from hybridrl.rewards.scorer import ScoreResult
from hybridrl.rewards.weighted import score
from hybridrl.trainer.rewarding import Rewarded
from tests.support.scorers import reward_scorer

WEIGHTED = "hybridrl.rewards.weighted.score"


def part(name: str, weight: float = 1.0, **args) -> dict:
    return {"function": f"tests.support.weighted_cases.{name}", "args": args, "weight": weight}


def scored(function: str, args: dict, responses: list[str]) -> ScoreResult:
    with reward_scorer(
        function, args, timeout_s=20.0, num_processes=1, failed_score=-7.0
    ) as scorer:
        return scorer.score([("prompt", each, {}, [7] * len(each)) for each in responses])


def test_a_sum_of_weighted_scores():
    parts = {"long": part("length", 0.5, scale=3.0), "vowels": part("vowels", -1.0)}
    # 0.5 * (3 * 4) - 1 * 3
    assert score("p", "aaeb", {}, parts=parts) == Score(
        3.0, {"long": 12.0, "vowels": 3.0, "vowels_a": 2.0, "vowels_e": 1.0}
    )


def test_a_weight_of_zero_only_shows():
    parts = {"long": part("length", 0.0), "ok": part("fails_on_x", 2.0)}
    assert score("p", "aaeb", {}, parts=parts) == Score(2.0, {"long": 4.0, "ok": 1.0})


def test_parts_may_be_weighted_sums():
    inner = {"function": WEIGHTED, "args": {"parts": {"n": part("length", 2.0)}}, "weight": 3.0}
    assert score("p", "aa", {}, parts={"in": inner}) == Score(12.0, {"in": 4.0, "in_n": 2.0})


def test_parts_come_back_from_the_reward_processes():
    parts = {"long": part("length", 10.0), "ok": part("fails_on_x")}
    result = scored(WEIGHTED, {"parts": parts}, ["", "abc", "ab"])
    assert result == ScoreResult([1.0, 31.0, 21.0], [], {"long": [0, 3, 2], "ok": [1, 1, 1]})


def test_a_part_with_trls_signature_gets_the_token_ids():
    result = scored(WEIGHTED, {"parts": {"ids": part("num_ids", 2.0)}}, ["", "abc"])
    assert (result.scores, result.failures) == ([0.0, 6.0], [])


def test_a_part_that_fails_fails_the_whole():
    parts = {"long": part("length", 10.0), "ok": part("fails_on_x")}
    result = scored(WEIGHTED, {"parts": parts}, ["ab", "x"])
    assert result.scores == [21.0, -7.0]
    assert "no x, please" in result.failures[0].reason
    assert result.parts == {"long": [2.0], "ok": [1.0]}
    assert result.item_parts == [{"long": 2.0, "ok": 1.0}, {}]


def test_responses_may_have_different_parts():
    result = scored("tests.support.weighted_cases.some_parts", {}, ["a b", "", "b"])
    assert result.parts == {"a": [2.0], "b": [2.0, 2.0]}


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("nan", "bad_part, part, returned nan, expected a finite number"),
        ("text", "bad_part, part, returned a str, expected a number"),
        ("name", "named a part 'two words', expected one word"),
    ],
)
def test_bad_parts_fail_their_response(response, reason):
    result = scored("tests.support.weighted_cases.bad_part", {}, [response])
    assert result.scores == [-7.0]
    assert reason in result.failures[0].reason


def test_a_part_that_is_no_number_is_named():
    parts = {"fine": part("length"), "odd": part("bad_part")}
    result = scored(WEIGHTED, {"parts": parts}, ["nan"])
    assert "part odd, tests.support.weighted_cases.bad_part," in result.failures[0].reason


def test_metrics_are_means_without_weights():
    rewarded = Rewarded([], [], [], {"long": [1.0, 2.0, 6.0], "ok": [0.5]})
    assert rewarded.part_metrics() == {"reward/part_long": 3.0, "reward/part_ok": 0.5}
    assert Rewarded([], [], []).part_metrics() == {}


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ("all", ["r.args.parts = all", "function, args, weight"]),
        ({}, ["r.args.parts = {}"]),
        ({"a": None}, ["r.args.parts.a = None", "~r.args.parts.a"]),
        ({"a-b": part("length")}, ["r.args.parts.a-b", "letters, digits"]),
        (
            {"a": part("length") | {"wieght": 2.0}},
            ["r.args.parts.a.wieght = 2.0", "Did you mean r.args.parts.a.weight?"],
        ),
        (
            {"a": part("length") | {"xyz": 2.0}},
            ["r.args.parts.a.xyz = 2.0", "function, args, weight"],
        ),
        (
            {"a": {"function": "tests.support.weighted_cases.length", "args": {}}},
            ["r.args.parts.a.weight is missing", "+r.args.parts.a.weight="],
        ),
        ({"a": part("length") | {"weight": "1"}}, ["r.args.parts.a.weight = 1, expected"]),
        ({"a": part("length") | {"weight": True}}, ["r.args.parts.a.weight = True"]),
        ({"a": part("length", float("nan"))}, ["r.args.parts.a.weight = nan"]),
        ({"a": part("length") | {"args": None}}, ["r.args.parts.a.args = None"]),
        ({"a": part("length") | {"function": 3}}, ["r.args.parts.a.function = 3"]),
        ({"a": part("lenth")}, ["r.args.parts.a.function", "has no lenth"]),
        (
            {"a": part("length", scael=2.0)},
            ["r.args.parts.a.args = {'scael': 2.0}", "Did you mean r.args.parts.a.args.scale?"],
        ),
        (
            {"a": {"function": WEIGHTED, "args": {"parts": 3}, "weight": 1.0}},
            ["r.args.parts.a.args.parts = 3"],
        ),
    ],
)
def test_the_check_names_the_key(parts, words):
    with pytest.raises(ConfigError) as caught:
        check_reward_function("r", WEIGHTED, {"parts": parts})
    assert len(caught.value.texts) == 1, caught.value
    assert [word for word in words if word not in caught.value.texts[0]] == []


def test_the_check_finds_every_problem_at_once():
    parts = {"a": part("lenth"), "b": part("length", float("inf")), "c": part("length")}
    with pytest.raises(ConfigError) as caught:
        check_reward_function("r", WEIGHTED, {"parts": parts})
    assert len(caught.value.texts) == 2


def test_the_call_is_checked_like_that_of_every_reward():
    with pytest.raises(ConfigError, match="missing a required argument: 'parts'"):
        check_reward_function("r", WEIGHTED, {})
    with pytest.raises(ConfigError, match=r"Did you mean r\.args\.parts\?"):
        check_reward_function("r", WEIGHTED, {"part": {}})
