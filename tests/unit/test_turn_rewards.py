"""Rewards of turns: their places on tokens, reward-to-go, and turns as members of their group."""

from collections.abc import Sequence
from functools import cache
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.agents.record import EpisodeRecord, TokenSequence
from hybridrl.agents.training.batch import EpisodeResult, batch_of, placed, unknown_turns
from hybridrl.data.batch import RolloutBatch
from hybridrl.trainer.advantage import AdvantageEstimator
from hybridrl.trainer.episodes.turn_rewards import with_turn_rewards
from hybridrl.trainer.errors import RunStopped
from hybridrl.trainer.rewarding import outcome_on_last_token
from tests.support.run_configs import run_config

# A turn: its conversation, and whether it is trained.
Turns = Sequence[tuple[int, bool]]


def record(turns: Turns) -> list[TokenSequence]:
    """The token sequences of an episode whose turn k has the name k and two tokens."""
    made = EpisodeRecord(lambda text, last, images: [ord(letter) for letter in text])
    texts: dict[int, str] = {}
    for k, (conversation, trained) in enumerate(turns):
        text = texts.get(conversation, chr(97 + conversation))
        how = {"name": str(k), "trained": trained, "truncated": False}
        made.add(made.start(text), [5, 6], [-1.0, -2.0], [3, 3], f"{k}!", **how)
        texts[conversation] = f"{text}{k}!?"
    return made.sequences


def batch(*episodes: tuple[list[TokenSequence], float, dict[str, float]]) -> RolloutBatch:
    """Episodes of one group with the reward of the whole and those of turns."""
    results = [
        EpisodeResult(0, 0, [7], made, whole + sum(turns.values()), 0, turns)
        for made, whole, turns in episodes
    ]
    return batch_of(results, 0, 1)


@cache
def estimator(*overrides: str) -> AdvantageEstimator:
    return AdvantageEstimator(run_config(*overrides).algorithm)


def advantages(of: RolloutBatch, *overrides: str, penalty: float = 0.0) -> list[list[float]]:
    """Advantages of the sampled tokens of each row; `penalty` is that of each such token."""
    whole, last = of.by_episode(), of.last_of_episodes
    scores = outcome_on_last_token(of.conversation.environment_rewards[last], whole)
    scores = with_turn_rewards(scores, whole)
    rewards = of.responses.like(scores.values - penalty * of.response_mask.values)
    found = estimator(*overrides).estimate(of, rewards)["advantages"]
    rows = zip(found.rows(), of.response_mask.rows(), strict=True)
    return [[round(float(v), 4) for v in row[mask]] for row, mask in rows]


LINE = [(0, True), (0, True)]
# Rewards-to-go 2 and 1 of an episode of two turns, and 0 of one turn: mean (3/2 + 0) / 2.
GROUP = [(record(LINE), 1.0, {"chatcmpl-0": 1.0}), (record(LINE[:1]), 0.0, {})]


# Variance (5/4)^2 / 2 + (1/4)^2 / 2 + (3/4)^2, over E - 1 = 1.
@pytest.mark.parametrize(("name", "std"), [("grpo", 1.375**0.5), ("dr_grpo", 1.0)])
def test_a_group_compares_the_rewards_to_go_of_its_turns(name, std):
    first, second, other = (round(value / std, 4) for value in (1.25, 0.25, -0.75))
    expected = [[first, first, second, second], [other, other]]
    assert advantages(batch(*GROUP), f"algorithm={name}") == expected


@pytest.mark.parametrize("penalty", [0.0, 0.125])
@pytest.mark.parametrize("name", ["grpo", "dr_grpo"])
def test_rewards_of_turns_change_no_advantage_of_another_prompt(name, penalty):
    """Outcomes 1 of two turns and 0 of one; the KL penalty of all their tokens counts."""
    turns = {"0": 0.5, "1": -0.25}
    others = [EpisodeResult(1, 0, [7], record(LINE), float(k), 0, turns) for k in range(2)]
    mine = [
        EpisodeResult(0, 0, [7], record(LINE), 1.0, 0),
        EpisodeResult(0, 0, [7], record(LINE[:1]), 0.0, 0),
    ]
    of = [batch_of([*mine, *(one._replace(turns=t) for one in others)], 0, 1) for t in (turns, {})]
    found, without = (advantages(one, f"algorithm={name}", penalty=penalty)[:2] for one in of)
    half = (1 - 2 * penalty) / 2
    first = round(half if name == "dr_grpo" else 0.5**0.5, 4)
    assert found == without == [[first] * 4, [-first] * 2]


@pytest.mark.parametrize("name", ["grpo", "dr_grpo"])
def test_a_small_reward_of_a_turn_changes_advantages_little(name):
    others = [(record(LINE[:1]), 0.0, {}), (record(LINE[:1]), 0.25, {})]
    small, none = (
        advantages(batch((record(LINE), 1.0, turns), *others), f"algorithm={name}")
        for turns in ({"0": 1e-6}, {})
    )
    assert small == none


def test_without_rewards_of_turns_a_group_compares_its_episodes():
    """Outcomes 2 and 0: mean 1."""
    group = [(record(LINE), 2.0, {}), GROUP[1]]
    assert advantages(batch(*group), "algorithm=dr_grpo") == [[1.0] * 4, [-1.0, -1.0]]


def test_a_return_has_the_rewards_from_its_token_on():
    """REINFORCE++: returns 2 2 1 1 0 0, of mean 1 and variance 2/3."""
    far = (3 / 2) ** 0.5
    expected = [[far, far, 0.0, 0.0], [-far, -far]]
    found = advantages(batch(*GROUP), "algorithm=reinforce_plus_plus", "algorithm.gamma=1")
    assert found == [[round(value, 4) for value in row] for row in expected]


@pytest.mark.parametrize("name", ["rloo", "opo", "pass_at_k"])
def test_an_estimator_of_whole_episodes_is_refused_by_name(name):
    with pytest.raises(RunStopped, match=name):
        advantages(batch(*GROUP), f"algorithm={name}")


def test_later_turns_are_those_of_any_conversation():
    """Turn 1 asks a sub-agent, turn 3 answers by what it found."""
    made = record([(0, True), (1, True), (0, True)])
    assert placed(made, {"msg_2": 1.0}) == [[0.0, 0.0], [1.0]]
    assert placed(made, {"resp_1": 1.0, "cmpl-2": 2.0}) == [
        [0.0 + 0.0 + 3 - 2, 2 - 3.0],
        [3.0],
    ]


def test_a_turn_that_is_not_trained_passes_its_reward_to_earlier_ones_only():
    """Rewards-to-go: turn 0 has 4, turn 2 has 1; the mean of their mean and 0 is 5/4."""
    made = record([(0, True), (0, False), (0, True)])
    group = [(made, 1.0, {"chatcmpl-1": 3.0}), GROUP[1]]
    rows = [[2.75, 2.75, -0.25, -0.25], [-1.25, -1.25]]
    assert advantages(batch(*group), "algorithm=dr_grpo") == rows


def test_an_answer_of_another_episode_is_named():
    assert unknown_turns(record(LINE), ["chatcmpl-1", "msg_0"]) == ""
    assert "'chatcmpl-7'" in unknown_turns(record(LINE), ["chatcmpl-7"])


def test_a_turn_that_two_ids_name_is_refused():
    """Its reward would count twice in that of the episode, and once among the turns."""
    reason = unknown_turns(record(LINE), ["resp_0", "chatcmpl-1", "msg_0"])
    assert "'resp_0'" in reason and "'msg_0'" in reason


turn = st.tuples(st.tuples(st.integers(0, 2), st.booleans()), st.integers(-4, 4))


@given(st.lists(st.lists(turn, min_size=1, max_size=6), min_size=2, max_size=3))
def test_the_advantage_of_a_turn_is_its_reward_to_go_less_the_mean(episodes):
    """By its definition, for any turns of any conversations, trained or not."""
    made = [record([kind for kind, _ in turns]) for turns in episodes]
    named = [{f"chatcmpl-{k}": float(r) for k, (_, r) in enumerate(turns)} for turns in episodes]
    expected, means = {}, []
    for index, turns in enumerate(episodes):
        trained = [k for k, ((_, is_trained), _) in enumerate(turns) if is_trained]
        for k in trained:
            expected[index, k] = 1.0 + sum(r for _, r in turns[k:])
        members = [expected[index, k] for k in trained]
        # An episode without a trained turn counts with its whole reward.
        means.append(fmean(members or [1.0 + sum(r for _, r in turns)]))
    mean = fmean(means)
    of = batch(*((one, 1.0, rewards) for one, rewards in zip(made, named, strict=True)))
    rows = iter(advantages(of, "algorithm=dr_grpo"))
    for index, one in enumerate(made):
        for sequence in one:
            found = next(rows)
            numbers = [t.number for t in sequence.turns if sequence.trained[t.start]]
            wanted = [expected[index, k] - mean for k in numbers for _ in range(2)]
            assert found == pytest.approx(wanted, abs=1e-3)
