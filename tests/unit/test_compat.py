"""Private names of torch, Ray and vLLM exist in the installed packages."""

import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest

from hybridrl.controller.ray import compat as ray_compat
from hybridrl.distributed import torch_compat
from hybridrl.rollout.vllm import compat as vllm_compat
from hybridrl.rollout.vllm import decode_graph as vllm_decode_graph
from hybridrl.rollout.vllm import exact as vllm_exact
from hybridrl.rollout.vllm import experts as vllm_experts
from hybridrl.rollout.vllm import fp8 as vllm_fp8
from hybridrl.rollout.vllm import images as vllm_images
from hybridrl.rollout.vllm import multi_step as vllm_multi_step
from hybridrl.rollout.vllm import recorded as vllm_recorded
from hybridrl.rollout.vllm import steps as vllm_steps
from tests.support.installed_names import missing

pytestmark = pytest.mark.full


def test_a_missing_name_is_listed():
    names = [("json", "loads JSONDecoder.gone dumps"), ("json.gone", "loads")]
    assert [text.partition(":")[0] for text in missing(names)] == [
        "json.JSONDecoder.gone",
        "json.gone",
    ]


def test_all_names_of_torch_exist():
    assert missing(torch_compat.NAMES) == []


def test_all_names_of_ray_exist():
    assert missing(ray_compat.PRIVATE_NAMES) == []


def test_vllm_has_all_names_and_compiles_once_for_all_sizes_of_graphs():
    """In a process of its own: switches are set before vLLM is imported."""
    if util.find_spec("vllm") is None:
        pytest.skip("needs vLLM")
    modules = (vllm_compat, vllm_exact, vllm_experts, vllm_fp8, vllm_images, vllm_multi_step)
    modules += (vllm_recorded, vllm_steps, vllm_decode_graph)
    names = [name for module in modules for name in module.NAMES] + [*vllm_recorded.KEPT_NAMES]
    code = (
        "from hybridrl.rollout.vllm import compat as vllm_compat\n"
        "vllm_compat.set_environment('cpu', enforce_eager=True)\n"
        "from tests.support.installed_names import cache_keys, missing\n"
        f"print('missing:', missing({names!r}))\n"
        "from hybridrl.config.checks.installation import cpu_head_sizes\n"
        "from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend\n"
        "print('same:', cpu_head_sizes() == CPUAttentionBackend.get_supported_head_sizes())\n"
        "print('keys of vLLM:', len({*cache_keys()}))\n"
        "with vllm_compat.compiled_for_all_batches(): print('keys here:', len({*cache_keys()}))\n"
    )
    root = Path(__file__).resolve().parents[2]
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=250
    )
    last = ran.stdout.splitlines()[-4:]
    assert last == ["missing: []", "same: True", "keys of vLLM: 2", "keys here: 1"], ran.stderr[
        -2000:
    ]
