"""Expected tokens of prompts: hand-worked estimates, and means that follow a change."""

import pytest

from hybridrl.data.lengths import Mean, ResponseLengths


def test_hand_worked():
    # Seen: 10 + 4 * (6 / 2); new: 7 + 4 * (30 / 5).
    lengths = ResponseLengths({3: Mean(2, 6)}, Mean(5, 30))
    assert lengths.expect([3, 8], [10, 7], 4) == [22.0, 31.0]


def test_before_the_first_response_prompts_count_alone():
    assert ResponseLengths().expect([3, 8], [10, 7], 4) == [10.0, 7.0]


def test_lengths_are_learned_by_prompt():
    """batch_of gives response b to prompt b; two batches, the second without prompt 2."""
    lengths = ResponseLengths()
    lengths.learn(range(3), [4, 1, 7])
    lengths.learn(range(2), [8, 1])
    lengths.commit()
    assert lengths.seen == {0: Mean(2, 12), 1: Mean(2, 2), 2: Mean(1, 7)}
    assert lengths.overall == Mean(5, 21)


def test_the_mean_of_responses_in_parts_follows_a_change():
    lengths = ResponseLengths()
    for length in [400] * 40 + [100] * 40:
        lengths.learn(range(16), [length] * 16, in_parts=True)
        lengths.commit()
    # Steps 1 to 40 weigh 0.9^40 times as much as steps 41 to 80.
    assert lengths.mean == pytest.approx(100 + 300 * 0.9**40 / (1 + 0.9**40))
    assert lengths.state()["overall"] == [1280, 320_000]
    before = lengths.state()
    lengths.commit()
    assert lengths.state() == before


def test_budgets_count_evaluations_only_until_something_was_sampled_in_parts():
    lengths = ResponseLengths()
    lengths.learn(range(2), [90, 70])
    assert lengths.mean == 80
    lengths.learn(range(2), [4, 6], in_parts=True)
    lengths.learn(range(2), [90, 70])
    lengths.commit()
    restored = ResponseLengths()
    restored.restore(lengths.state())
    assert lengths.mean == restored.mean == 5
