"""The resharder on real process groups: weights that come to lie elsewhere, bits that flip.

tests/reshard_ranks.py says what each rank does; tests/distributed/test_reshard_equality.py holds
the same against a real vLLM.
"""

import pytest

from tests.distributed.launch import run_on_ranks
from tests.reshard_ranks import LATE_S, run_adapted, run_side


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
