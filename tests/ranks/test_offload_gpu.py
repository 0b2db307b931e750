"""Offload on a GPU: the same bits, memory that is really free, and not before it was copied."""

import os
import subprocess
import sys
import time

import pytest
import torch

from hybridrl.config.choices import DType, Offload
from hybridrl.distributed.mesh import build_mesh
from hybridrl.distributed.offload import Offloadable
from hybridrl.workers.actor import ActorWorker
from hybridrl.workers.reference import ReferenceWorker
from tests.support.launch import run_on_ranks
from tests.support.offload_cases import assert_same_bits, every_schedule
from tests.support.role_configs import actor_config, fsdp_config, reference_config
from tests.support.tiny_hf import tiny_folder
from tests.support.training_batches import my_part, training_batch

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 1, reason="needs an NVIDIA GPU"),
]
GIB = 2**30
# Far below a PCIe 4 link's 25 GB/s: pageable memory would be slower still.
SLOWEST = 8e9


def every_schedule_exactly(folder, dtype):
    """Deterministic kernels, so that the schedules may be compared by bits."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    return every_schedule(folder, "cuda", dtype)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("dtype", list(DType))
def test_results_are_those_without_offload_bit_for_bit(dtype, ranks, tmp_path):
    if ranks > GPUS:
        pytest.skip(f"needs {ranks} GPUs, found {GPUS}")
    folder = tiny_folder("llama", tmp_path / "llama")
    by_rank = run_on_ranks(every_schedule_exactly, ranks, folder, dtype, device_type="cuda")
    for runs in by_rank:
        for offload in (Offload.idle_optimizer, Offload.idle_all):
            assert_same_bits(runs[offload][0], runs[Offload.none][0])


def idle_bytes(folder):
    """Bytes that tensors take: all roles present, then all idle; and those of their storages."""
    spec = fsdp_config(dp_shard=1, offload=Offload.idle_all)
    mesh = build_mesh(spec, "cuda")
    roles = {
        "actor": ActorWorker(actor_config(folder, spec), mesh),
        "ref": ReferenceWorker(reference_config(folder, spec), mesh),
    }
    for role in roles.values():
        role.connect(roles)
    roles["actor"].update(my_part(training_batch()), 1, 0.1)
    optimizer = roles["actor"].optimizer
    optimizer.moments.wait()
    torch.cuda.synchronize()
    parameters = [*roles["actor"].model.parameters(), *roles["ref"].model.parameters()]
    roles["ref"].weights.wait()
    states = optimizer.adamw.state.values()
    tensors = [*parameters, *(s[name] for s in states for name in ("exp_avg", "exp_avg_sq"))]
    size = sum(tensor.to_local().untyped_storage().nbytes() for tensor in tensors)
    present = torch.cuda.memory_allocated()
    optimizer.moments.offload()
    for role in roles.values():
        role.rest()
    return present, torch.cuda.memory_allocated(), size


def test_idle_roles_leave_their_memory(tmp_path):
    """Weights of actor and ref and the actor's moments; blocks may be larger than tensors."""
    folder = tiny_folder("qwen2", tmp_path / "qwen2")
    ((present, idle, size),) = run_on_ranks(idle_bytes, 1, folder, device_type="cuda")
    assert size > 4 * 50_000
    assert present - idle >= size, (present, idle, size)


def gib_of_weights():
    generator = torch.Generator("cuda").manual_seed(0)
    return [
        torch.randn(rows, 4096, device="cuda", generator=generator)
        for rows in (4096, 1, 30_001, 20_000, 11_000)
    ]


def test_a_gib_goes_and_comes_back_at_the_speed_of_the_link():
    tensors = gib_of_weights()
    size = sum(tensor.nbytes for tensor in tensors)
    expected = [tensor.sum(dtype=torch.float64) for tensor in tensors]
    moved = Offloadable(lambda: tensors, torch.device("cuda", 0), moves=True)
    moved.offload()  # takes the host memory
    moved.wait()
    before = torch.cuda.memory_allocated()
    seconds = {}
    for name, move in (("offload", moved.offload), ("onload", moved.wait)):
        torch.cuda.synchronize()
        start = time.perf_counter()
        move()
        if name == "offload":
            assert before - torch.cuda.memory_allocated() >= size
        torch.cuda.synchronize()
        seconds[name] = time.perf_counter() - start
    for tensor, total in zip(tensors, expected, strict=True):
        assert torch.equal(tensor.sum(dtype=torch.float64), total)
    speeds = {name: f"{size / s / 1e9:.1f} GB/s" for name, s in seconds.items()}
    assert all(size / s > SLOWEST for s in seconds.values()), speeds


def test_memory_in_flight_is_not_given_to_compute_that_would_overwrite_it():
    """Compute that begins right behind an offload allocates and fills as much again, many times."""
    tensors = gib_of_weights()
    expected = [tensor.cpu() for tensor in tensors]
    moved = Offloadable(lambda: tensors, torch.device("cuda", 0), moves=True)
    for _ in range(3):
        moved.offload()
        for _ in range(4):
            junk = [torch.full_like(host, torch.nan, device="cuda") for host in expected]
            del junk
        moved.onload()
        square = torch.ones(4096, 4096, device="cuda")
        for _ in range(10):
            square = square @ square * 0.0
        moved.wait()
        for tensor, host in zip(tensors, expected, strict=True):
            assert torch.equal(tensor.cpu(), host)


def test_an_emptied_cache_returns_the_memory_to_the_driver():
    """What vLLM does before it takes memory; the copies must have ended by then."""
    tensors = gib_of_weights()
    size = sum(tensor.nbytes for tensor in tensors)
    moved = Offloadable(lambda: tensors, torch.device("cuda", 0), moves=True)
    torch.cuda.empty_cache()
    before, _ = torch.cuda.mem_get_info()
    moved.offload()
    torch.cuda.empty_cache()
    after, _ = torch.cuda.mem_get_info()
    assert after - before > 0.95 * size, f"{(after - before) / GIB:.2f} of {size / GIB:.2f} GiB"


HOLES = """
import torch
from hybridrl.distributed.process_memory import use_expandable_segments
device = torch.device("cuda", 0)
use_expandable_segments(device)
for mib in range(500, 1000, 50):
    torch.empty(mib << 20, dtype=torch.uint8, device=device)
print(torch.cuda.memory_reserved() >> 20)
"""


@pytest.mark.parametrize("setting", [None, "expandable_segments:False"])
def test_batches_of_rising_size_leave_no_holes(setting):
    """In a process of its own, as the allocator's settings stay."""
    environment = os.environ | ({"PYTORCH_ALLOC_CONF": setting} if setting else {})
    held = subprocess.check_output([sys.executable, "-c", HOLES], env=environment, text=True)
    assert (int(held) < 1100) is (setting is None)
