"""The copy kernel and the resharder on GPUs, without vLLM."""

import pytest
import torch

from tests.support.launch import run_on_ranks
from tests.support.random_rects import check_kernel
from tests.support.reshard_ranks import run_side

pytestmark = pytest.mark.gpu


def test_the_kernel_does_what_the_loop_does():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    check_kernel("cuda", 4)


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("ranks", "tp", "replicas", "by_columns"),
    [(1, 1, 1, False), (2, 2, 1, True), (4, 1, 1, False), (4, 2, 1, True), (4, 2, 2, True)],
)
def test_weights_arrive_over_nccl_and_no_flipped_bit_passes(ranks, tp, replicas, by_columns):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs, found {torch.cuda.device_count()}")
    for rank, seen in enumerate(
        run_on_ranks(run_side, ranks, tp, replicas, by_columns, "cuda", device_type="cuda")
    ):
        assert seen["wrong"] == [], rank
        assert seen["missed"] == [], rank
        if replicas > 1:
            assert "\n  gate_up on ranks [3]: was sent weights that differ" in seen["replicas"]
