"""Private names of torch, Ray and vLLM exist in the installed packages."""

import subprocess
import sys
from importlib import import_module, util
from pathlib import Path

import pytest

from hybridrl.controller.ray import compat as ray_compat
from hybridrl.distributed import torch_compat
from hybridrl.rollout import vllm_compat, vllm_experts, vllm_routing


def missing(names):
    """Return the (module, attribute) pairs that the installed packages lack, each with a reason.

    A field of a dataclass without a default is not an attribute of the class, but annotated.
    """
    found = []
    for module, path in names:
        try:
            owner = import_module(module)
        except ImportError as error:
            found.append(f"{module}: {error}")
            continue
        for part in path.split("."):
            if not hasattr(owner, part) and part not in getattr(owner, "__annotations__", {}):
                found.append(f"{module}.{path}")
                break
            owner = getattr(owner, part, None)
    return found


def test_a_missing_name_is_listed():
    names = [("json", "loads"), ("json", "JSONDecoder.gone"), ("json.gone", "loads")]
    assert [text.partition(":")[0] for text in missing(names)] == [
        "json.JSONDecoder.gone",
        "json.gone",
    ]


def test_all_names_of_torch_exist():
    assert missing(torch_compat.NAMES) == []


def test_all_names_of_ray_exist():
    assert missing(ray_compat.PRIVATE_NAMES) == []


def test_all_names_of_vllm_exist():
    """In a process of its own: switches are set before vLLM is imported."""
    if util.find_spec("vllm") is None:
        pytest.skip("needs vLLM")
    names = vllm_compat.NAMES + vllm_experts.NAMES + vllm_routing.NAMES
    code = (
        "from hybridrl.rollout import vllm_compat\n"
        "vllm_compat.set_environment('cpu', enforce_eager=True)\n"
        "from tests.unit.test_compat import missing\n"
        f"print('missing:', missing({names!r}))"
    )
    root = Path(__file__).resolve().parents[2]
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=250
    )
    assert ran.stdout.splitlines()[-1:] == ["missing: []"], ran.stderr[-2000:]
