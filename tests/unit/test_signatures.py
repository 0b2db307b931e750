"""Rewards with verl's, TRL's and our signature: recognition, real calls in processes, refusals."""

import inspect

import pytest

from hybridrl.config.choices import RewardSignature
from hybridrl.config.errors import ConfigError
from hybridrl.config.user_code.classes import check_reward_function
from hybridrl.config.user_code.signatures import CALLS, is_async
from hybridrl.rewards.scorer import ScoreResult
from tests.support import own_rewards
from tests.support.scorers import reward_scorer

TEXTS = ["x", "bad", "y", "x", "y"]
OURS, VERL, TRL = RewardSignature.hybridrl, RewardSignature.verl, RewardSignature.trl


def path(name: str) -> str:
    return f"tests.support.own_rewards.{name}"


def scored(name: str, items: list, **settings) -> ScoreResult:
    args = settings.pop("args", {})
    with reward_scorer(
        path(name), args, timeout_s=20.0, num_processes=1, failed_score=-7.0, **settings
    ) as scorer:
        return scorer.score(items)


def rows(*responses: str, **columns) -> list:
    return [("prompt", response, {"answer": "7"} | columns) for response in responses]


@pytest.mark.parametrize(
    ("name", "signature"),
    [
        *((name, OURS) for name in ("own", "own_later", "called", "anything")),
        *((name, VERL) for name in ("verl_score", "verl_short", "verl_later")),
        *((name, TRL) for name in ("trl_score", "trl_chat", "trl_ids", "trl_later")),
    ],
)
def test_signatures_are_recognised_by_parameter_names(name, signature):
    assert check_reward_function("reward", path(name), {}) is signature


def test_async_functions_are_recognised():
    names = [name for name, value in vars(own_rewards).items() if inspect.isfunction(value)]
    found = {name for name in [*names, "called"] if is_async(vars(own_rewards)[name], {})}
    assert found == {name for name in names if name.endswith("_later")} | {"sleepy", "called"}


@pytest.mark.parametrize("name", ["openrlhf", "keywords", "renamed"])
def test_a_signature_that_fits_none_is_refused_with_all_three(name):
    with pytest.raises(ConfigError) as caught:
        check_reward_function("reward", path(name), {})
    (problem,) = caught.value.texts
    for words in (f"reward.function = {path(name)}", *CALLS.values(), "reward.signature="):
        assert words in problem
    with pytest.raises(ConfigError) as caught:
        check_reward_function("eval.rules.mine", path(name), {})
    assert "reward.signature" not in caught.value.texts[0]


@pytest.mark.parametrize(
    ("name", "args", "signature", "words"),
    [
        ("own", {"bonsu": 1.0}, "auto", "Did you mean reward.args.bonus?"),
        ("verl_short", {"bonsu": 1.0}, "auto", "Did you mean reward.args.bonus?"),
        ("verl_score", {"bonus": 1.0}, "auto", "unexpected keyword argument 'bonus'"),
        ("sleepy", {}, "auto", "Add +reward.args.seconds=<value>."),
        ("own", {}, "verl", "reward.signature = verl"),
        ("verl_score", {}, "trl", "Set reward.signature=verl"),
        ("verl_score", {}, "hybridrl", "Set reward.signature=verl"),
        ("openrlhf", {}, "verl", "missing a required argument: 'queries'"),
    ],
)
def test_arguments_and_named_signatures_are_checked(name, args, signature, words):
    with pytest.raises(ConfigError) as caught:
        check_reward_function("reward", path(name), args, RewardSignature(signature))
    assert words in caught.value.texts[0]


def test_a_named_signature_calls_functions_of_any_names():
    result = scored("renamed", rows("7"), signature=OURS)
    assert result == ScoreResult([0.5], [])


def test_verls_function_gets_source_answer_and_extra_info():
    items = rows("7", extra_info={"index": 1, "split": "train"})
    items += rows("8") + rows("7", extra_info=None)
    assert scored("verl_score", items) == ScoreResult(
        [1.0, 0.0, 1.0], [], {"acc": [1.0, 0.0, 1.0], "known": [2.0, 0.0, 0.0]}
    )
    found = scored("verl_source", rows("", data_source="2", dataset="3") + rows("", dataset="3"))
    assert found.scores == [2.0, 3.0]
    assert scored("verl_short", rows("7"), args={"bonus": 1.0}).scores == [2.0]


def test_a_verl_dict_without_score_fails():
    (failure,) = scored("verl_without_score", rows("7")).failures
    assert "returned a dict without score" in failure.reason


def test_trls_function_gets_columns_and_all_responses_to_a_prompt():
    items = [(prompt, "x" * n, {"answer": "xx"}) for prompt in "ab" for n in (1, 3, 2)]
    assert scored("trl_score", items).scores == [0.0, 0.0, 1.0] * 2
    assert scored("trl_best", items).scores == [0.0, 1.0, 0.0] * 2


def test_trls_function_gets_messages_if_the_prompt_column_has_messages():
    prompt = [{"role": "user", "content": "1 + 1?"}]
    assert scored("trl_chat", rows("two", "2", prompt=prompt)).scores == [3.0, 1.0]
    # Of text completions it takes the first character, which has no content.
    (failure, _) = scored("trl_chat", rows("two", "2")).failures
    assert "TypeError" in failure.reason


def test_trls_function_gets_token_ids():
    items = [("p", "a", {"answer": "7"}, [1, 2]), ("p", "b", {"answer": "7"}, [5])]
    assert scored("trl_ids", items).scores == [3.0, 5.0]


def test_none_of_a_trl_function_is_a_failure_of_its_response_alone():
    result = scored("trl_some", rows("a", "skip", "b"))
    assert result.scores == [1.0, -7.0, 1.0]
    (failure,) = result.failures
    assert failure.index == 1 and "returned None" in failure.reason


def test_a_bad_response_in_a_trl_call_fails_alone():
    items = [(prompt, text, {}) for prompt, text in zip("aaabb", TEXTS, strict=True)]
    result = scored("trl_fails", items)
    assert result.scores == [1.0, -7.0, 1.0, 2.0, 2.0]
    (failure,) = result.failures
    assert failure.index == 1 and "a bad one" in failure.reason


@pytest.mark.parametrize(
    ("name", "words"),
    [("trl_no_list", "expected a list of numbers"), ("trl_too_few", "0 numbers for 1 completions")],
)
def test_a_trl_function_that_returns_no_list_of_that_length_fails(name, words):
    result = scored(name, rows("a", "b"))
    assert result.scores == [-7.0, -7.0]
    assert words in result.failures[0].reason


@pytest.mark.parametrize(
    ("name", "scores"), [("own_later", [1, 0]), ("verl_later", [2, 0]), ("trl_later", [1, 2])]
)
def test_async_functions_of_every_signature_are_awaited(name, scores):
    assert scored(name, rows("7", "88"), concurrency=2).scores == scores


def test_parts_of_a_sum_may_have_any_signature_and_be_async():
    def part(name: str, weight: float = 1.0) -> dict:
        return {"function": path(name), "args": {}, "weight": weight}

    names = {"own": 1.0, "verl_score": 10.0, "trl_some": 100.0, "verl_later": 1000.0}
    parts = {name: part(name, weight) for name, weight in names.items()}
    with reward_scorer(
        "hybridrl.rewards.weighted.score",
        {"parts": parts},
        timeout_s=20.0,
        num_processes=1,
        failed_score=-7.0,
        concurrency=4,
    ) as scorer:
        result = scorer.score(rows("7", "skip"))
    assert result.scores == [2111.0, 0.0]
    assert result.parts["trl_some"] == [1.0]  # None for the other
