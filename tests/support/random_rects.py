"""Random copies, done by the kernel and by the loop that defines what it should do."""

import random

import torch

from hybridrl.distributed.regions import FP8
from hybridrl.reshard.copies import Buffers, Copier, CopyRect, hashes

NUMEL, SUMS = 40_000, 5
CASTS = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, FP8),
    (FP8, FP8),
]


def check_kernel(device_type: str, trials: int) -> None:
    """Compare targets, sums of what was sent and of what was found, for every cast.

    Vector accesses are possible everywhere, somewhere or nowhere: sizes, strides and starts are
    multiples of 8 elements or not, and buffers begin at multiples of 16 bytes or one element off.
    """
    device = torch.device(device_type)
    for seed in range(trials):
        for source_dtype, dtype in CASTS:
            for step in (8, 1):
                numbers = random.Random(seed)
                generator = torch.Generator(device).manual_seed(seed)
                source = torch.randn(NUMEL + 1, device=device, generator=generator)
                if source_dtype is FP8:
                    source = (source * 50).round()
                elif device_type == "cpu" and dtype is FP8:
                    # The interpreter's casts round wrongly: numbers that need none.
                    source = source.where(source.abs() > 0.1, 0.0).to(torch.float8_e4m3fn)
                elif device_type == "cpu":
                    source = source.to(dtype)  # the interpreter's casts round otherwise
                source = source.to(source_dtype)[seed % 2 :]
                rects = random_rects(numbers, step)
                loop = run(Copier, rects, source, dtype)
                kernel = run(kernel_class(), rects, source, dtype)
                for ours, expected in zip(kernel, loop, strict=True):
                    assert torch.equal(ours, expected), (seed, source_dtype, dtype, step)


def kernel_class() -> type:
    from hybridrl.reshard.triton_copies import TritonCopier

    return TritonCopier


def random_rects(numbers: random.Random, step: int) -> list[CopyRect]:
    """Rectangles that lie anywhere in buffer 0, one after the other in buffer 1."""

    def about(largest: int) -> int:
        return step * numbers.randint(1, largest // step)

    rects: list[CopyRect] = []
    end = 0
    while True:
        rows, columns = numbers.choice((1, numbers.randint(1, 150))), about(300)
        source_stride, target_stride = columns + about(8), columns + about(8)
        if end + rows * target_stride > NUMEL or rows * source_stride > NUMEL - step:
            return rects
        start = step * numbers.randint(0, (NUMEL - rows * source_stride) // step)
        place = (numbers.randint(0, 100), numbers.randint(0, 100))
        salt, number = 2 * numbers.getrandbits(60) + 1, numbers.randrange(SUMS)
        rects.append(
            CopyRect(
                *(0, start, source_stride),
                *(1, end, target_stride),
                *(rows, columns),
                *place,
                salt,
                number,
                place[0],
            )
        )
        end += rows * target_stride


def run(kind: type, rects: list[CopyRect], source: torch.Tensor, dtype: torch.dtype) -> list:
    """The target without and with fingerprints, what they add up to, and what is found there."""
    device = source.device
    target = torch.zeros(NUMEL, dtype=dtype, device=device)
    buffers = Buffers(device)
    buffers.bind([source[:NUMEL], target])
    all_hashes = hashes(300, 500, device)
    generator = torch.Generator(device).manual_seed(0)
    # Some numbers are beyond the largest of FP8, and on GPUs some below the smallest.
    scales = 10 ** (torch.rand(300, device=device, generator=generator) * 6 - 4)
    if device.type == "cpu":
        scales = scales.clamp(max=4).log2().round().exp2()
    copier = kind(rects, buffers, dtype, all_hashes, write=True, scales=scales)
    copier.run(0, 2, None, paced=True)
    copier.run(1, 2, None, paced=False)
    silent = target.clone()
    target.zero_()
    sent, found = (torch.zeros(SUMS, dtype=torch.int64, device=device) for _ in range(2))
    copier.run(0, 3, sent, paced=False)
    copier.run(1, 3, sent, paced=True)
    copier.run(2, 3, sent, paced=False)
    written = [
        rect._replace(source=1, source_start=rect.target_start, source_stride=rect.target_stride)
        for rect in rects
    ]
    reader = kind(written, buffers, dtype, all_hashes, write=False)
    reader.run(0, 1, found, paced=False)
    assert torch.equal(sent, found)
    return [silent, target, sent]
