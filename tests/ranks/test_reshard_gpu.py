"""The reshard on GPUs: NCCL, vLLM's sleep mode and, in one case, CUDA graphs.

Each case starts its own processes, because vLLM's sleeping memory allows one engine per process.
"""

import pytest
import torch

from hybridrl.config.choices import DType, Layout, RolloutWeights
from tests.support.launch import run_on_ranks
from tests.support.reshard_cases import BY_COLUMNS, Case, run_cases, write_folders

BFLOAT, FP8 = DType.bfloat16, RolloutWeights.fp8
CASES = [
    (1, Case("qwen2", BFLOAT, tp=1)),
    (1, Case("llama", BFLOAT, tp=1, enforce_eager=False)),
    (2, Case("qwen2", BFLOAT, tp=2)),
    (2, Case("qwen3", BFLOAT, tp=1)),
    (2, Case("llama", BFLOAT, tp=2, dp_replicate=2)),
    (2, Case("qwen3_tied", BFLOAT, tp=2)),  # with parameters that cannot be traced
    (4, Case("qwen2_untied", BFLOAT, tp=2)),
    (4, Case("qwen2_untied", BFLOAT, tp=2, layout=Layout.plain)),
    (4, Case("qwen2", BFLOAT, tp=4)),
    (4, Case("qwen3", BFLOAT, tp=2, dp_replicate=2)),
    (1, Case("qwen3_moe", BFLOAT, tp=1, enforce_eager=False)),
    (2, Case("qwen3_moe", BFLOAT, tp=2)),
    (2, Case("qwen3_moe", BFLOAT, tp=2, expert_parallel=True)),
    (2, Case("qwen2_moe", BFLOAT, tp=1)),
    (4, Case("olmoe", BFLOAT, tp=2)),
    (1, Case("qwen2", BFLOAT, tp=1, weights=FP8, enforce_eager=False)),
    (2, Case("qwen2", BFLOAT, tp=2, weights=FP8)),
    (2, Case("qwen3_tied", BFLOAT, tp=1, dp_replicate=2, weights=FP8)),
    (1, Case("qwen3_moe", BFLOAT, tp=1, weights=FP8, enforce_eager=False)),
    (2, Case("qwen3_moe", BFLOAT, tp=2, weights=FP8)),
    (2, Case("qwen3_moe", BFLOAT, tp=2, expert_parallel=True, weights=FP8)),
    *((1, Case(f, BFLOAT, tp=1)) for f in ("mistral", "phi3", "olmo2", "granite")),
    *((1, Case(f, BFLOAT, tp=1)) for f in ("smollm3", "gemma3", "olmoe", "mixtral")),
]


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("ranks", "case"), CASES, ids=str)
def test_vllm_holds_what_it_would_load(ranks, case, tmp_path):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs, found {torch.cuda.device_count()}")
    write_folders(tmp_path, [case.model])
    by_rank = run_on_ranks(
        run_cases, ranks, [case], tmp_path, "cuda", device_type="cuda", time_limit_s=380
    )
    for rank, by_case in enumerate(by_rank):
        one = by_case[str(case)]
        assert one["differs_A"] == one["differs_B"] == []
        assert one["errors_A"].mean() < case.rounding
        assert one["errors_B"].mean() < case.rounding
        if case.model in BY_COLUMNS:  # recorded, in the first case in CUDA graphs
            assert all(differing < case.rounding * total for differing, total in one["experts_B"])
        for name, message in one["corrupted"].items():
            assert f"\n  {name} on ranks [{ranks - 1}]" in message, (rank, message)
        assert one["captured"] == 2
        assert "before reshard" in one["early"]
        assert "before reshard" in one["asleep"]
        assert one["greedy"][0] == one["greedy"][1]
        leader = by_rank[rank - rank % case.tp][str(case)]
        for which in "AB":
            own, first = one[f"rollout_{which}"], leader[f"rollout_{which}"]
            assert torch.equal(own.responses.values, first.responses.values)
