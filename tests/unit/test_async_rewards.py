"""Async rewards in real processes: concurrency, order, failures and changes that stay alone."""

import time

import pytest

from hybridrl.processes.messages import FailureKind
from hybridrl.rewards.scorer import RewardScorer, ScoreResult
from tests.support.scorers import reward_scorer

FAILED = -7.0


def scorer(name: str, *, timeout_s=20.0, processes=1, concurrency=8, **args) -> RewardScorer:
    return reward_scorer(
        f"tests.support.own_rewards.{name}",
        args,
        timeout_s=timeout_s,
        num_processes=processes,
        failed_score=FAILED,
        concurrency=concurrency,
    )


def misbehaved(responses: list[str], **settings) -> ScoreResult:
    with scorer("misbehave_later", **settings) as pool:
        return pool.score([("", response, {}) for response in responses])


@pytest.mark.parametrize(("processes", "concurrency"), [(1, 16), (2, 17)])
def test_so_many_responses_are_under_way_and_scores_stand_in_order(processes, concurrency):
    with scorer("sleepy", processes=processes, concurrency=concurrency, seconds=0.1) as pool:
        pool.score([("", "0", {})] * 4)
        start = time.monotonic()
        result = pool.score([("", str(index), {}) for index in range(80)])
        seconds = time.monotonic() - start
    assert result == ScoreResult([float(index) for index in range(80)], [])
    waves = -(-80 // concurrency)
    assert 0.1 * waves <= seconds < 0.1 * (waves + 6)


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("raises", "ValueError: no such unit"),
        ("exits", "SystemExit: 0"),
        ("cancels", "CancelledError"),
        ("times_out", "TimeoutError: of its own"),
    ],
)
def test_what_raises_fails_alone(response, reason):
    result = misbehaved(["good", response, "good"])
    assert result.scores == [1.0, FAILED, 1.0]
    (failure,) = result.failures
    assert (failure.index, failure.kind) == (1, FailureKind.error)
    assert reason in failure.reason
    assert "own_rewards.py" in failure.traceback and "asyncio/" not in failure.traceback


def test_what_waits_too_long_is_cancelled_and_the_others_go_on():
    start = time.monotonic()
    result = misbehaved(["good", "waits", "waits", *["good"] * 13], timeout_s=0.6)
    assert time.monotonic() - start < 0.6 + 2.5
    assert result.scores == [1.0, FAILED, FAILED, *[1.0] * 13]
    failure = result.failures[0]
    assert (failure.kind, failure.reason) == (FailureKind.timeout, "took longer than 0.6 s")
    assert "own_rewards.py" in failure.traceback


def test_what_ignores_its_cancellation_fails_alone():
    result = misbehaved(["good", "threads", "swallows", "good"], timeout_s=0.4)
    assert result.scores == [1.0, 1.0, FAILED, 1.0]
    (failure,) = result.failures
    assert (failure.index, failure.reason) == (2, "took longer than 0.4 s")


@pytest.mark.parametrize(
    ("response", "kind", "reason"),
    [
        ("dies", FailureKind.error, "its process ended, exit code 3"),
        ("blocks", FailureKind.timeout, "could not be interrupted"),
    ],
)
def test_the_neighbours_of_what_kills_or_blocks_its_process_are_computed_again(
    response, kind, reason
):
    result = misbehaved(["good", "threads", response, "good", "good"], timeout_s=0.4)
    assert result.scores == [1.0, 1.0, FAILED, 1.0, 1.0]
    (failure,) = result.failures
    assert (failure.index, failure.kind) == (2, kind)
    assert reason in failure.reason


def test_fewer_responses_may_be_under_way_than_there_are_processes():
    result = misbehaved(["dies", "good", "dies", "good"], processes=2, concurrency=1)
    assert result.scores == [FAILED, 1.0, FAILED, 1.0]


@pytest.mark.parametrize("name", ["used_up", "used_up_later"])
def test_what_a_reward_changes_in_its_example_no_other_response_sees(name):
    with scorer(name) as pool:
        result = pool.score([("", "", example := {"left": [1.0]})] * 40)
    assert (result, example) == (ScoreResult([1.0] * 40, []), {"left": [1.0]})
