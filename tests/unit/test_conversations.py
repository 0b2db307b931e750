"""Generation in turns, with scripted turns: token-in token-out, masks, limits, failures, requests.

Environments are stepped by the task that their processes run, in this one.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.data.batch import RolloutBatch
from hybridrl.data.requests import Requests, SamplingParams
from hybridrl.data.seeds import sample_seed
from hybridrl.data.sources.prompts import Prompt
from hybridrl.data.sources.turns import TurnTokens
from hybridrl.environments.base import EnvironmentReply, StepRequest, StepResult
from hybridrl.processes.messages import FailureKind
from hybridrl.trainer.episodes.answers import AnswerImages
from hybridrl.trainer.episodes.base import GenerateWhole, Wanted, whole_episodes
from hybridrl.trainer.episodes.conversations import (
    MAX_REASONS,
    Conversations,
    EnvironmentRewards,
    FailureReasons,
    Limits,
)
from hybridrl.trainer.episodes.turns import TurnEpisodes
from hybridrl.trainer.timing.engines import turn_metrics
from tests.support.fake_engine import FakeEngines
from tests.support.role_configs import model_config
from tests.support.talking import AB, ABA, ELEVEN, END, ONE, STOP, TOKENIZER, A, B, Here, decode

SEED, EMBEDDED = 7, model_config("embedded")


# Prompt, sample and turn of each seed.
DRAWN = {
    sample_seed(SEED, 1, p, k, *(("turn", turn) if turn else ())): (p, k, turn)
    for p in range(5)
    for k in range(8)
    for turn in range(5)
}


class Engines(FakeEngines):
    """Two engines; the response of a prompt, sample and turn is scripted."""

    def __init__(self, script: Callable[[int, int, int], list[int]]) -> None:
        super().__init__(
            lambda request: script(*DRAWN[request.seed]), 2, log_prob=lambda ids: -1.0 - ids[-1]
        )
        self.holds = 5


def prompt(number: int, **example: str) -> Prompt:
    return Prompt(number, [A] * (1 + number % 3), "a", "q", example, {})


def generator(sample_turn, environments, limits, failures) -> GenerateWhole:
    tokens, images = TurnTokens(TOKENIZER, [END], ["="], "user"), AnswerImages(EMBEDDED, [])
    conversations = Conversations(environments, tokens, decode, limits, failures, images)
    rollout = SimpleNamespace(seed=SEED, max_response_tokens=limits.max_tokens, keep_kv=False)
    episodes = TurnEpisodes(rollout, conversations, sample_turn)
    engines = lambda asked, count: [one.prompt_id % count for one in asked.prompts]  # noqa: E731
    return partial(whole_episodes, episodes, engines, 2)


def wanted(prompts: Sequence[Prompt], each: int = 1, first: int = 0) -> Wanted:
    return Wanted(prompts, 1, SamplingParams(1.0), each, first)


def talk(
    script,
    ids=(3,),
    each=1,
    first=0,
    *,
    environments=None,
    max_turns=4,
    max_tokens=40,
    greeting="",
    failures=None,
):
    """The rollout of a script with an environment; its engines and environments."""
    environments = environments or Here("tests.support.environment_cases.Counts", turns=3)
    engines, limits = Engines(script), Limits(max_turns, max_tokens)
    generate = generator(engines.generate, environments, limits, failures or FailureReasons())
    prompts = [prompt(number, greeting=greeting) for number in ids]
    return generate(wanted(prompts, each, first)), engines, environments


def always(*ids: int) -> Callable[[int, int, int], list[int]]:
    return lambda prompt, sample, turn: list(ids)


def test_three_turns_by_hand():
    """Turns "a=", answers "1:a=" and "2:a="; ":" is no token and vanishes."""
    rollout, *_ = talk(always(A, STOP))
    batch = rollout
    said, heard = [A, STOP], [[ONE, A, STOP], TOKENIZER.encode("2:a=")]
    assert batch.responses.values.tolist() == [*said, *heard[0], *said, *heard[1], *said]
    mask = [True] * 2 + [False] * 3 + [True] * 2 + [False] * len(heard[1]) + [True] * 2
    assert batch.response_mask.values.tolist() == mask
    log_probs = batch.rollout_log_probs.values
    assert log_probs[batch.response_mask.values].tolist() == [-3.0, -2.0] * 3
    assert (log_probs[~batch.response_mask.values] == 0).all()
    assert batch.conversation.turns.tolist() == [3]
    assert batch.conversation.environment_rewards.tolist() == [6.0]
    assert batch.weight_version.tolist() == [5] and not batch.truncated.any()
    assert [row.tolist() for row in batch.prompts.rows()] == [[A]]


IDS = st.lists(st.sampled_from([A, B, AB, ABA, ONE, ELEVEN]), min_size=1, max_size=6)


@given(st.lists(IDS, min_size=3, max_size=3))
@settings(deadline=None)
def test_sampled_ids_are_kept_whatever_they_would_be_read_as(turns):
    """With tokens that merge: what was sampled stands in the response and in every later prompt."""
    rollout, engines, environments = talk(lambda p, s, turn: [*turns[turn], STOP])
    sampled = [[*ids, STOP] for ids in turns]
    batch = rollout
    of_policy = batch.responses.values[batch.response_mask.values].tolist()
    assert of_policy == [token for ids in sampled for token in ids]
    heard = [TOKENIZER.encode(f"{k}:{text}") for k, text in enumerate(environments.heard, 1)]
    history = [A]
    for turn, ids in enumerate(sampled):
        assert engines.calls[turn].prompts.values.tolist() == history
        history += [*ids, *heard[turn]]
    assert environments.heard == decode(sampled)


def test_this_tokenizer_would_have_changed_them():
    ids = [A, B, ONE, ONE]
    assert TOKENIZER.encode(TOKENIZER.decode(ids)) == [AB, ELEVEN] != ids


def test_conversations_come_back_in_the_order_of_their_prompts():
    """Sample k of prompt p says "a=" in its first k turns and then p + 1 times "b"."""
    rollout, engines, _ = talk(
        lambda p, sample, turn: [A, STOP] if turn < sample else [B] * (p + 1) + [STOP],
        (1, 0, 2),
        each=3,
        environments=Here("tests.support.environment_cases.Misbehaves"),
        max_turns=3,
        max_tokens=100,
    )
    batch = rollout
    assert batch.group_id.tolist() == [1, 1, 1, 0, 0, 0, 2, 2, 2]
    assert batch.conversation.turns.tolist() == [3] * 9
    assert batch.truncated.all()  # nobody ended them
    assert batch.prompts.lengths.tolist() == [2, 2, 2, 1, 1, 1, 3, 3, 3]
    for row, mask, group, sample in zip(
        batch.responses.rows(),
        batch.response_mask.rows(),
        batch.group_id.tolist(),
        [0, 1, 2] * 3,
        strict=True,
    ):
        turns = [[A, STOP]] * sample + [[B] * (group + 1) + [STOP]] * (3 - sample)
        assert row[mask].tolist() == [token for turn in turns for token in turn]
    assert [len(asked) for asked in engines.calls] == [9, 9, 9]


def test_turns_are_asked_for_by_response_where_the_conversation_began():
    ends_first = lambda p, sample, turn: [A, STOP]  # noqa: E731
    _, engines, _ = talk(ends_first, (1, 0, 2), each=2, first=4, max_tokens=30)
    first, _, third = engines.calls
    for turn, one in enumerate(engines.calls):
        drawn = [DRAWN[request.seed] for request in one.requests]
        assert drawn == [(p, sample, turn) for p in (1, 0, 2) for sample in (4, 5)]
        assert one.group_id.tolist() == [1, 1, 0, 0, 2, 2]
        assert [request.engine for request in one.requests] == [1, 1, 0, 0, 0, 0]
        assert {request.params.stop_token_ids for request in one.requests} == {(STOP,)}
        assert one.token_budget is None
    left = [[request.max_tokens for request in one.requests] for one in engines.calls]
    assert left[0] == [30] * 6
    # 2 sampled and 3 heard of 30; then 4 more, or one less where "2" and ":" are unknown
    assert left[1] == [25] * 6
    used = third.prompts.lengths - first.prompts.lengths
    assert left[2] == (30 - used).tolist()


def test_all_of_a_conversation_has_one_budget():
    """2 said, 3 heard, 2 said; an answer of 3 more would leave nothing to say."""
    for max_tokens, turns, length in ((2, 1, 2), (5, 1, 2), (6, 2, 6), (7, 2, 7), (8, 2, 7)):
        rollout, *_ = talk(always(A, STOP), max_tokens=max_tokens)
        assert (rollout.conversation.turns.tolist(), rollout.responses.lengths.tolist()) == (
            [turns],
            [length],
        ), max_tokens
        assert rollout.truncated.all()
        assert bool(rollout.response_mask.values[-1]), "ends with a sampled token"


def test_a_turn_that_was_cut_off_is_the_last_and_still_earns():
    rollout, _, environments = talk(always(A, *[B] * 10, STOP), max_tokens=8)
    assert rollout.conversation.turns.tolist() == [1] and rollout.truncated.all()
    assert rollout.conversation.environment_rewards.tolist() == [1.0]
    assert len(environments.heard) == 1


def test_after_the_last_turn_nothing_more_is_heard():
    rollout, *_ = talk(always(A, STOP), max_turns=2)
    assert rollout.conversation.turns.tolist() == [2] and rollout.truncated.all()
    assert rollout.responses.values[-2:].tolist() == [A, STOP]
    assert rollout.conversation.environment_rewards.tolist() == [3.0]


def test_an_opening_is_heard_before_the_first_turn_and_counts_in_the_budget():
    rollout, engines, _ = talk(always(A, STOP), (3, 4), each=2, greeting="ba", max_turns=1)
    batch, opening = rollout, TOKENIZER.encode("ba")
    assert all(row.tolist() == [*opening, A, STOP] for row in batch.responses.rows())
    assert all(row.tolist() == [False] * 2 + [True] * 2 for row in batch.response_mask.rows())
    assert [row.tolist() for row in engines.calls[0].prompts.rows()] == [
        [A, *opening],
        [A, *opening],
        [A, A, *opening],
        [A, A, *opening],
    ]
    assert [request.max_tokens for request in engines.calls[0].requests] == [38] * 4
    assert batch.prompts.lengths.tolist() == [1, 1, 2, 2]


PROMPTS = [prompt(0), prompt(1, fails="init"), prompt(2, fails="reset")]


def test_a_failed_environment_ends_its_conversation_and_gets_the_failed_score():
    """Sample 1 of prompt 0 fails in its second turn, prompt 1 before its first one."""

    class Fails(Here):
        def _reply(self, item):
            if isinstance(item, StepRequest) and item.text == "ab=":
                return EnvironmentReply(
                    "", StepResult("", 0.0, True), FailureKind.timeout, "took too long"
                )
            return super()._reply(item)

    environments, failures = Fails("tests.support.environment_cases.Misbehaves"), FailureReasons()
    engines = Engines(lambda p, sample, turn: [AB, STOP] if turn and sample else [A, STOP])
    generate = generator(engines.generate, environments, Limits(2, 40), failures)
    batch = generate(wanted(PROMPTS[:2], each=2))
    numbers = batch.conversation.environment_failures.tolist()
    assert [number > 0 for number in numbers] == [False] + [True] * 3
    assert batch.conversation.turns.tolist() == [2, 2, 1, 1]
    prompts = [PROMPTS[p] for p in (0, 0, 1, 1)]
    rewarded = EnvironmentRewards(decode, failures, -7.0).score(prompts, batch)
    assert rewarded.scores == [2.0, -7.0, -7.0, -7.0]
    assert [(f.index, f.kind, f.reason) for f in rewarded.failures] == [
        (1, FailureKind.timeout, "took too long"),
        (2, FailureKind.error, "no such example"),
        (3, FailureKind.error, "no such example"),
    ]
    assert rewarded.texts[2] == "a="


def test_an_opening_that_leaves_nothing_to_say_has_failed():
    failures = FailureReasons()
    rollout, *_ = talk(always(A, STOP), greeting="b" * 40, failures=failures)
    (number,) = rollout.conversation.environment_failures.tolist()
    reason = "its opening of 40 tokens leaves none of rollout.max_response_tokens=40"
    assert failures.look_up(number) == (FailureKind.error, reason)
    assert rollout.responses.values.tolist() == [A, STOP]


def test_reasons_are_counted_once_each_and_kept_in_bounds():
    failures = FailureReasons()
    first = failures.number(FailureKind.error, "first")
    assert failures.number(FailureKind.error, "first") == first > 0
    assert failures.number(FailureKind.timeout, "first") != first
    numbers = [failures.number(FailureKind.timeout, f"took {k} s") for k in range(3 * MAX_REASONS)]
    assert len({*numbers}) < MAX_REASONS
    kind, reason = failures.look_up(numbers[-1])
    assert kind is FailureKind.timeout and "the log" in reason
    assert failures.look_up(first) == (FailureKind.error, "first")


def test_stale_weights_between_turns_are_noticed():
    engines = Engines(always(A, STOP))

    def changing(requests: Requests) -> RolloutBatch:
        engines.holds += 1
        return engines.generate(requests)

    with pytest.raises(AssertionError, match="the weights changed"):
        environments = Here("tests.support.environment_cases.Misbehaves")
        generate = generator(changing, environments, Limits(2, 40), FailureReasons())
        generate(wanted(PROMPTS[:1]))


def test_engines_and_environments_are_timed_over_all_turns():
    rollout, *_ = talk(always(A, STOP))
    idle, engine = rollout.engines
    assert (engine.tokens, engine.seconds, engine.first_token_s) == (6, 6.0, 0.5)
    assert (idle.tokens, idle.seconds) == (0, 0.0)
    assert rollout.engine.tolist() == [1]
    metrics = turn_metrics(rollout)
    assert metrics["environment/seconds"] == rollout.environment_s > 0.0
    heard = len(rollout.responses.values) - 6
    assert metrics["environment/tokens_mean"] == heard > 0
    assert (metrics["rollout/turns_mean"], metrics["rollout/turns_max"]) == (3.0, 3.0)
    without = replace(rollout, conversation=None)
    assert turn_metrics(without) == {}
