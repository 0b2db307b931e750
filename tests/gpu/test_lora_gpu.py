"""Adapters inside vLLM's compiled layers and CUDA graphs: it samples what the trainer learns."""

import pytest
import torch

from hybridrl.models.resolve import resolve_model
from tests.distributed.launch import run_on_ranks
from tests.lora_gains import Size, gains

AT = (1, 10, 30, 100)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def found_at(rank, lr):
    folder = resolve_model("smollm2_135m")
    arguments = (folder, rank, lr, AT, Size(64, 8, 128), "cuda")
    return run_on_ranks(gains, 1, *arguments, device_type="cuda", time_limit_s=380)[0]


def test_vllm_shows_what_adapters_and_what_all_weights_learn():
    """Kernels of vLLM and trainer disagree no more with adapters than without."""
    adapters, full = found_at(16, 1e-5), found_at(0, 1e-6)
    for found in (adapters, full):
        print(found)
        assert min(found.held.values()) > 0.95, found
        assert min(found.share.values()) > 0.95, found
    for step in AT:
        assert adapters.difference[step] < 1.1 * full.difference[step], (adapters, full)
