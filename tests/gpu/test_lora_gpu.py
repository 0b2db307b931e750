"""Adapters inside vLLM's compiled layers and CUDA graphs: it samples what the trainer learns."""

import pytest
import torch

from hybridrl.models.resolve import resolve_model
from tests.distributed.launch import run_on_ranks
from tests.lora_gains import Size, gains, write_bfloat16

AT = (1, 10, 30, 100)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def found_at(rank, lr, target):
    folder = write_bfloat16(resolve_model("smollm2_135m"), target / str(rank))
    arguments = (folder, rank, lr, AT, Size(16, 8, 128), "cuda")
    found = run_on_ranks(gains, 1, *arguments, device_type="cuda", time_limit_s=190)[0]
    print(found)
    assert all(abs(held - 1) < 1e-6 for held in found.held.values()), found
    return found


def test_vllm_shows_what_adapters_and_what_all_weights_learn(tmp_path):
    """Kernels of vLLM and trainer disagree no more with adapters than without."""
    adapters, full = found_at(16, 1e-5, tmp_path), found_at(0, 1e-6, tmp_path)
    assert min(adapters.share.values()) > 0.95, adapters
    for step in AT:
        assert adapters.difference[step] < 1.1 * full.difference[step], (adapters, full)
