"""The resharder on real process groups: weights that come to lie elsewhere, bits that flip.

tests/reshard_ranks.py says what each rank does; tests/distributed/test_reshard_equality.py holds
the same against a real vLLM.
"""

import pytest

from tests.distributed.launch import run_on_ranks
from tests.reshard_ranks import run_side


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
        assert seen["buckets"] > 1
        if replicas > 1:
            assert "\n  gate_up on ranks [3]: was sent weights that differ" in seen["replicas"]
            assert seen["replicas"].count("\n") == 1
