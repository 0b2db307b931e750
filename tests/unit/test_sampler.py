"""The loop over an engine's steps: what ends a batch, what live requests get, and failures."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from hybridrl.data.requests import FAILED, STOP, Message, Progress, Request, SamplingParams
from hybridrl.rollout.live import MIN_STEPS, Live
from hybridrl.rollout.sampler import Call, Sampler
from hybridrl.rollout.vllm.multi_step import steps_ahead
from tests.support.batches import requests_of
from tests.support.fake_engine import CONFIG, FakeEngine

PLAIN, OWN = SamplingParams(1.0), SamplingParams(1.0, more={"min_p": 0.5})


def countdown(request: Request) -> list[int]:
    """As many tokens as the prompt's first says, down to 1."""
    return list(range(request.prompt[0], 0, -1))


def lengths(asked: list[list[int]], most_steps: int = 1, **call) -> tuple[list[int], list[bool]]:
    batch = requests_of(asked, PLAIN, max_tokens=9, **call)
    answer = Sampler(FakeEngine(countdown, most_steps=most_steps), CONFIG).generate(batch, 3)
    assert (answer.weight_version == 3).all()
    return answer.responses.lengths.tolist(), answer.unfinished.tolist()


@pytest.mark.parametrize(
    ("call", "sampled", "unfinished"),
    [
        ({}, [2, 4, 8], [False] * 3),
        ({"token_budget": 2.5}, [2, 3, 3], [False, True, True]),  # 8 tokens of 7.5
        ({"token_budget": 0.0}, [0, 0, 0], [True] * 3),
        ({"token_budget": 99.0, "enough_ended": 0.5}, [2, 4, 4], [False, False, True]),
        ({"token_budget": 0.0, "must_finish": [False, True, False]}, [2, 4, 4], [0, 0, 1]),
    ],
)
def test_what_ends_a_batch(call, sampled, unfinished):
    assert lengths([[2], [4], [8]], **call) == (sampled, unfinished)


@pytest.mark.parametrize("budget", [0.5, 1, 2.5, 4, 99])
def test_a_budget_is_kept_by_an_engine_that_returns_several_tokens(budget):
    """To less than a token for each open request, as with single ones."""
    asked = [[9], [9], [8]]
    counts, unfinished = lengths(asked, most_steps=3, token_budget=budget)
    assert (counts, unfinished) == lengths(asked, token_budget=budget)


def test_held_requests_go_on_where_they_were():
    engine = FakeEngine(countdown)
    sampler = Sampler(engine, CONFIG)
    first = requests_of([[3], [5]], PLAIN, max_tokens=9, token_budget=1.0, holds=True)
    assert sampler.generate(first, 0).responses.values.tolist() == [3, 5]
    rest = requests_of([[3, 3], [5, 5]], PLAIN, max_tokens=8, names=[0, 1], holds=True)
    answer = sampler.generate(rest, 1)
    assert answer.responses.values.tolist() == [2, 1, 4, 3, 2, 1]
    assert answer.engines[0].old_kv_tokens == 6
    assert len(engine.requests) == 2 and not engine.open and not sampler.held


def test_an_engine_that_sleeps_gets_no_request():
    engine = FakeEngine(countdown)
    engine.sleep()
    with pytest.raises(RuntimeError, match="asleep"):
        Sampler(engine, CONFIG).generate(requests_of([[1]], PLAIN, max_tokens=9), 0)
    assert not engine.requests


def test_a_prompt_of_which_a_token_is_left_is_not_decoded():
    """Its grammar, or an image there, is vLLM's to schedule."""
    state = {"num_tokens": 9, "num_prompt_tokens": 9, "max_tokens": 8, "num_computed_tokens": 8}
    rest = SimpleNamespace(**state, num_output_placeholders=0, is_prefill_chunk=True)
    queued = SimpleNamespace(**state | {"num_computed_tokens": 9}, num_output_placeholders=1)
    queued.is_prefill_chunk = False
    assert steps_ahead([queued], 40, 4) == (4, [9], [1])
    assert steps_ahead([queued, rest], 40, 4) == (0, [], [])
    assert steps_ahead([queued], 13, 4) == (2, [9], [1])  # the context ends
    queued.max_tokens = 2
    assert steps_ahead([queued], 40, 4)[0] == 0  # vLLM schedules the last one


class Driver:
    """A channel to a driver that sends some messages at a time; the last time it ends the run."""

    def __init__(self, *messages: Sequence[Message]) -> None:
        self.messages = [*messages]
        self.sent: dict[str, list[Progress]] = {}

    def send(self, progress: list[Progress]) -> None:
        for one in progress:
            self.sent.setdefault(one.request_id, []).append(one)

    def receive(self, *, blocks: bool) -> list[Message]:
        assert self.messages or not blocks
        return [*self.messages.pop(0)] if self.messages else []


def served(engine: FakeEngine, *messages: Sequence[Message]) -> dict[str, list[Progress]]:
    """Progress by request, after the driver has sent some messages every few steps."""
    driver, call = Driver(*messages), Call(engine)
    live = Live(call, driver, 7)
    call.run(live.goes_on)
    call.drop([*call.open])
    live.send()
    assert not engine.open and not call.responses
    assert all(one.version == 7 for parts in driver.sent.values() for one in parts)
    return driver.sent


def live(name: str, length: int, params: SamplingParams = PLAIN, **more) -> Request:
    return Request(name, [length], 1, 99, params, **more)


def test_live_requests_come_and_go_while_others_are_sampled():
    asked = [live("whole", 6), live("pieces", 6, in_pieces=True), live("dropped", 50)]
    sent = served(FakeEngine(countdown), asked, ["dropped", ""], [live("late", 2)], [None])
    assert [one.tokens for one in sent["whole"]] == [[6, 5, 4, 3, 2, 1]]
    assert [one.tokens for one in sent["pieces"]] == [[6, 5, 4, 3], [2, 1]]
    assert [one.reason for one in sent["pieces"]] == ["", STOP]
    assert sent["whole"][0].log_probs == [-6.0, -5.0, -4.0, -3.0, -2.0, -1.0]
    assert sent["late"][0].tokens == [2, 1] and "dropped" not in sent


@pytest.mark.parametrize("most_steps", [2, 4, 64])
def test_live_requests_are_looked_at_as_often_by_an_engine_that_decodes_several_tokens(most_steps):
    """After MIN_STEPS steps, in which it decodes no more tokens."""
    asked = [live("pieces", 10, in_pieces=True), live("dropped", 50)]
    sent = served(FakeEngine(countdown, most_steps=most_steps), asked, ["dropped"], [None])
    assert [len(one.tokens) for one in sent["pieces"]] == [MIN_STEPS, MIN_STEPS, 2]
    assert "dropped" not in sent


def test_at_the_end_live_requests_are_cut_unless_they_must_finish():
    asked = [live("cut", 50), live("finished", 20, OWN, must_finish=True)]
    sent = served(FakeEngine(countdown), asked, [None])
    (cut,), (finished,) = sent["cut"], sent["finished"]
    assert (len(finished.tokens), finished.reason) == (20, STOP)
    assert cut.reason == "" and 20 <= len(cut.tokens) < 20 + MIN_STEPS


def test_an_engine_may_fail_at_parameters_of_the_requests_own_alone():
    sent = served(FakeEngine(countdown, fails="ERROR"), [live("0", 3, OWN)], [None])
    assert sent["0"] == [Progress("0", [], [], FAILED, 7)]
    with pytest.raises(RuntimeError, match="ended request 0 with ABORT"):
        served(FakeEngine(countdown, fails="ABORT"), [live("0", 3)], [None])
