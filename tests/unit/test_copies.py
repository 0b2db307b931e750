"""Copies: regions of any number of dims as rectangles, and the kernel against the loop."""

import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from hybridrl.distributed.regions import Region
from hybridrl.reshard.copies import Buffers, Copier, cut, hashes, quantised
from tests.support.random_rects import check_kernel

pytestmark = pytest.mark.full

CPU = torch.device("cpu")


def take(tensor, offset, shape):
    return tensor[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]


@pytest.mark.parametrize(
    ("whole", "offset", "shape"),
    [
        ((7,), (2,), (4,)),
        ((7, 5), (1, 2), (3, 3)),
        ((4, 7, 5), (1, 2, 0), (3, 4, 5)),
        ((2, 3, 4, 5), (0, 1, 1, 2), (2, 2, 3, 2)),
        ((7, 5), (3, 0), (0, 5)),
    ],
)
def test_a_region_of_any_dims_is_copied_whole(whole, offset, shape):
    """Out of a tensor that holds its coordinates, into the far corner of a larger one."""
    source = torch.arange(torch.Size(whole).numel(), dtype=torch.float32).view(whole)
    target = torch.full([n + 1 for n in shape], -1.0)
    corner = (1,) * len(shape)
    buffers = Buffers(CPU)
    buffers.bind([source, target])
    read, written = (0, take(source, offset, shape)), (1, take(target, corner, shape))
    rects = list(cut(buffers, read, written, Region(offset, shape), whole, salt=1, sum=0))
    copier = Copier(rects, buffers, torch.float32, hashes(64, 64, CPU))
    copier.run(0, 1, None, paced=False)
    expected = torch.full_like(target, -1.0)
    take(expected, corner, shape).copy_(take(source, offset, shape))
    assert torch.equal(target, expected)


def test_rows_of_a_3_dim_tensor_are_numbered_through():
    """Element (i, j, k) of a 4 x 7 x 5 tensor is in row 7 i + j."""
    tensor, region = torch.zeros(4, 7, 5), Region((2, 3, 1), (2, 4, 2))
    buffers = Buffers(CPU)
    buffers.bind([tensor])
    part = (0, take(tensor, *region))
    rects = cut(buffers, part, part, region, (4, 7, 5), salt=1, sum=0)
    assert [(p.row, p.column, p.rows, p.columns) for p in rects] == [
        (7 * 2 + 3, 1, 4, 2),
        (7 * 3 + 3, 1, 4, 2),
    ]


def test_fp8_is_the_nearest_number_and_the_even_one_of_two():
    """Against a search among all numbers of FP8, in float64."""
    values = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    values[:, 0] = 300.0  # beyond the largest number for some of the scales
    values[0, 1:5] = torch.tensor([2.125, 2.375, 2**-10, 3 * 2**-10])  # between two of them
    scales = 10 ** torch.linspace(-1, 1, 64)
    scales[0] = 1.0
    bits = torch.arange(-128, 128).to(torch.int8)
    numbers = bits.view(torch.float8_e4m3fn).double()
    known = numbers.isfinite() & ~((numbers == 0) & (bits < 0))
    bits, numbers = bits[known], numbers[known]
    exact = (values.bfloat16().float() / scales[:, None]).double()
    distance = (exact[..., None] - numbers).abs() + (bits % 2) * 1e-12
    expected, found = numbers[distance.argmin(-1)], quantised(values, scales)
    assert torch.equal(found.view(torch.float8_e4m3fn).double(), expected)
    assert (expected[:, 0] == 448.0).any()


def test_buffers_report_when_copiers_must_be_rebuilt():
    memory, buffers = torch.zeros(64), Buffers(CPU)
    assert buffers.bind([memory[:16]])
    assert not buffers.bind([memory[16:32]]), "as aligned as before"
    assert buffers.addresses.tolist() == [memory[16:].data_ptr()]
    assert buffers.bind([memory[1:17]]), "no longer aligned"
    assert buffers.bind([memory.bfloat16()[:16]]), "another dtype"


def test_a_tensor_without_memory_is_refused_each_time():
    buffers, away = Buffers(CPU), torch.zeros(8)
    buffers.bind([away])
    away.untyped_storage().resize_(0)
    for _ in range(2):
        with pytest.raises(AssertionError, match="no memory"):
            buffers.bind([away])


def test_released_buffers_keep_nothing_alive():
    buffers, memory = Buffers(CPU), torch.zeros(8)
    buffers.bind([memory])
    kept = weakref.ref(memory)
    del memory
    assert kept() is not None
    buffers.release()
    assert kept() is None


def test_the_kernel_does_what_the_loop_does():
    """In Triton's interpreter, which must be chosen before Triton is imported."""
    pytest.importorskip("triton", reason="Triton comes with vLLM, or with torch for GPUs")
    root = Path(__file__).resolve().parents[2]
    code = f"from {check_kernel.__module__} import check_kernel; check_kernel('cpu', 2)"
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=250)
