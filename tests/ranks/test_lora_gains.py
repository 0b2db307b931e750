"""vLLM in bfloat16 samples from the adapted policy that is trained, from the first update on.

At the learning rates of GPU recipes, from weights that bfloat16 holds exactly. Adapters merged into
such weights showed 0.07 of the trainer's gain after 1 step, 0.57 after 10 and 0.93 after 30.
"""

import pytest

from hybridrl.models.resolve import resolve_model
from tests.support.launch import run_on_ranks
from tests.support.lora_gains import Size, gains, write_bfloat16

LORA_LR, FULL_LR = 1e-5, 1e-6


def gains_of(rank, lr, at, size, target):
    folder = write_bfloat16(resolve_model("embedded"), target / "model")
    return run_on_ranks(gains, 1, folder, rank, lr, at, size, time_limit_s=280)[0]


@pytest.mark.slow
def test_vllm_holds_what_adapters_learned(tmp_path):
    found = gains_of(16, LORA_LR, (1, 10, 30), Size(8, 4, 32), tmp_path)
    assert all(abs(held - 1) < 1e-6 for held in found.held.values()), found
    assert max(found.difference.values()) < 0.01, found
    assert abs(found.share[30] - 1) < 2 * found.error[30] < 0.2, found


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "lr"), [(16, LORA_LR), (0, FULL_LR)])
def test_vllm_shows_what_was_learned(rank, lr, tmp_path):
    found = gains_of(rank, lr, (1, 10, 30, 100), Size(16, 4, 64), tmp_path)
    print(found)
    assert all(abs(held - 1) < 1e-6 for held in found.held.values()), found
    for step, share in found.share.items():
        assert abs(share - 1) < 3 * found.error[step], found
    assert found.error[100] < 0.05, found
