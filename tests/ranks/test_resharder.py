"""The resharder on real process groups: weights that come to lie elsewhere, bits that flip.

tests/support/reshard_ranks.py says what each rank does; tests/ranks/test_reshard_equality.py holds
the same against a real vLLM.
"""

import pytest

from tests.support.launch import run_on_ranks
from tests.support.reshard_ranks import LATE_S, run_adapted, run_side, run_split


@pytest.mark.parametrize(
    ("ranks", "tp", "replicas", "by_columns"),
    [(2, 2, 1, True), (4, 1, 1, False), (4, 2, 1, True), (4, 2, 2, True)],
)
def test_weights_arrive_wherever_they_lie_and_no_flipped_bit_passes(
    ranks, tp, replicas, by_columns
):
    for rank, seen in enumerate(run_on_ranks(run_side, ranks, tp, replicas, by_columns, "cpu")):
        assert seen["wrong"] == [], rank
        assert seen["missed"] == [], rank
        assert seen["issued"] == seen["planned"] >= seen["buckets"] > 1
        late = seen["late"]
        assert not late or late["wait_s"] > LATE_S / 2 > late["move_s"]
        if replicas > 1:
            assert "\n  gate_up on ranks [3]: was sent weights that differ" in seen["replicas"]
            assert seen["replicas"].count("\n") == 1


@pytest.mark.parametrize(("ranks", "tp", "replicas"), [(1, 1, 1), (2, 2, 1), (4, 2, 2)])
def test_frozen_weights_move_once_and_are_still_watched(ranks, tp, replicas):
    """Under adapters: bits that flip in what was not moved again show, and so does its loss."""
    for seen in run_on_ranks(run_adapted, ranks, tp, replicas, "cpu"):
        assert seen["wrong"] == []
        assert seen["missed"] == []
        full, adapted = seen["first"], seen["second"]
        assert 0 < adapted["written_bytes"] < 0.7 * full["written_bytes"]
        assert adapted["received_bytes"] <= full["received_bytes"]
        everywhere = list(range(ranks))
        assert f"\n  embed on ranks {everywhere}: does not hold what was sent" in seen["lost"]
        for moved_all in ("again", "not_kept", "unsure"):
            assert seen[moved_all]["written_bytes"] == full["written_bytes"]


@pytest.mark.parametrize(
    ("trainers", "engines", "tp", "replicas", "adapted"),
    [
        (1, 1, 1, 1, False),
        (2, 1, 2, 1, True),
        pytest.param(4, 2, 1, 2, False, marks=pytest.mark.slow),
        pytest.param(4, 2, 2, 2, True, marks=pytest.mark.slow),
        pytest.param(3, 3, 1, 1, True, marks=pytest.mark.slow),
        (4, 1, 1, 4, False),
    ],
)
def test_weights_move_from_ranks_that_train_to_others_that_sample(
    tmp_path, trainers, engines, tp, replicas, adapted
):
    """Each engine takes from one copy of the weights; several are compared."""
    size = trainers + engines * tp
    found = run_on_ranks(run_split, size, str(tmp_path), trainers, tp, replicas, adapted)
    for rank, seen in enumerate(found):
        assert seen["rank"] == rank
        assert seen["wrong"] == []
        first, second = seen["bytes"]
        if rank < trainers:
            assert first == second == (0, 0)
        else:
            assert first[0] == first[1] > 0, "all that is written arrives from others"
            assert second == first if not adapted else 0 < second[0] < 0.7 * first[0]
        assert seen["flipped"].endswith(
            f"\n  gate_up on ranks [{size - 1}]: does not hold what was sent to it"
        )
        is_compared = 1 < replicas <= engines
        assert ("was sent weights that differ" in seen["differs"]) is is_compared
