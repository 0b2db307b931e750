"""GPUs that share sequences compute what one computes alone: NCCL and the packed kernel."""

import pytest
import torch

from hybridrl.config.choices import DType
from tests.support.launch import run_on_ranks
from tests.support.sequence_cases import computed
from tests.support.tiny_hf import tiny_folder
from tests.support.whole_weights import relative_difference

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason="needs two NVIDIA GPUs"),
]


# All ranks share each sequence, or half of them: two groups with shards of all.
@pytest.mark.parametrize(("ranks", "sharing"), [(2, 2), (4, 4), (4, 2)])
@pytest.mark.parametrize(
    ("dtype", "compile_layers", "numbers", "gradients"),
    [
        (DType.float32, False, 1e-4, 1e-4),
        # bfloat16 has three digits; log-probs are about -4
        (DType.bfloat16, False, 0.05, 0.03),
        (DType.bfloat16, True, 0.05, 0.03),
    ],
)
def test_gpus_share_sequences(tmp_path, dtype, compile_layers, numbers, gradients, ranks, sharing):
    """Numbers within a distance, gradients within a share of their norm."""
    if ranks > GPUS:
        pytest.skip(f"needs {ranks} GPUs, found {GPUS}")
    folder = tiny_folder("qwen2", tmp_path / "qwen2")
    spec = {"param_dtype": dtype, "compile": compile_layers}
    one, shared = {"dp_shard": 1}, {"dp_shard": ranks, "ulysses_size": sharing}
    (alone,) = run_on_ranks(computed, 1, folder, spec | one, "cuda", device_type="cuda")
    for found in run_on_ranks(computed, ranks, folder, spec | shared, "cuda", device_type="cuda"):
        for name, wanted in alone[0].items():
            torch.testing.assert_close(found[0][name], wanted, rtol=0, atol=numbers)
        for budget, wanted in alone[1].items():
            assert relative_difference(found[1][budget], wanted) < gradients
        metrics, wanted = found[2], alone[2]
        assert metrics["actor/first_log_ratio_max"] == 0.0
        assert metrics["actor/entropy"] == pytest.approx(wanted["actor/entropy"], rel=0.01)
