"""What does it cost to keep idle weights and moments in host memory?

Question   At what speed do shards move between GPU and pinned host memory, and how much of that
           time hides behind the computation that runs meanwhile?
Workload   Qwen2.5-1.5B's weights as one of two ranks holds them (3.1 GB in float32, tensor by
           tensor), beside matrix products that take about as long as one move.
Measures   GB/s of each direction, the first offload (which page-locks the memory) apart; against a
           plain copy of one large tensor from and to pinned memory in the same run. Hidden share:
           1 - (both at once - products alone) / move alone.
Run        python benchmarks/offload.py            (one GPU)
           python benchmarks/offload.py --small    (CPU: ordinary memory, nothing can overlap)

Prints one JSON line; append it to benchmarks/results/offload.jsonl.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.shapes import QWEN2_5
from benchmarks.timing import min_median_max, result, seconds_of, seconds_per_call
from hybridrl.config.planner.model_shape import model_shape
from hybridrl.config.planner.shape import ModelShape
from hybridrl.distributed.offload import Offloadable

SHAPE = model_shape(QWEN2_5["1.5b"])
RANKS = 2


def main() -> None:
    """Measure both directions, alone and beside compute; print one line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--small", action="store_true", help="a hundredth, on the CPU")
    parser.add_argument("--repeats", type=int, default=10)
    arguments = parser.parse_args()
    device = torch.device("cpu") if arguments.small else torch.device("cuda", 0)
    shapes = matrices(SHAPE)
    scale = RANKS * (100 if arguments.small else 1)
    shards = [torch.ones(max(1, rows // scale), columns, device=device) for rows, columns in shapes]
    settings = {"gb": round(size_of(shards) / 1e9, 3)}
    print(json.dumps(result("offload", settings, measure(shards, device, arguments.repeats))))


def matrices(shape: ModelShape) -> list[tuple[int, int]]:
    """(rows, columns) of the embedding, then of each layer's attention, MLP and norm."""
    _, kv_heads, head_dim, _ = shape.largest_attention
    hidden, keys = shape.hidden, kv_heads * head_dim
    attention = [(hidden, hidden), (keys, hidden), (keys, hidden), (hidden, hidden)]
    layer = [*attention, *[(shape.intermediate, hidden)] * 3, (hidden, 1)]
    return [(shape.vocab, hidden), *layer * shape.layers]


def measure(shards: list[Tensor], device: torch.device, repeats: int) -> dict[str, object]:
    """Speeds of both directions, the baselines', and what of a move hides behind products."""
    moved = Offloadable(lambda: shards, device, moves=True)
    size = size_of(shards)
    first = seconds_of(moved.offload)
    seconds_of(moved.wait)
    offload, onload = [], []
    for _ in range(repeats):
        offload.append(seconds_of(moved.offload))
        onload.append(seconds_of(moved.wait))
    products = products_lasting(statistics.median(offload), device)
    alone = statistics.median(seconds_per_call(products, warmup=1, repeats=repeats))
    both_offload, both_onload = [], []
    for _ in range(repeats):
        both_offload.append(seconds_of(lambda: (moved.offload(), products())))
        both_onload.append(seconds_of(lambda: (moved.onload(), products(), moved.wait())))
    speed = lambda seconds: min_median_max([size / s / 1e9 for s in seconds], digits=2)  # noqa: E731
    to_host, to_device = plain_copies(size, device, repeats)
    return {
        "first_offload_s": round(first, 3),
        "offload_gb_per_s_min_median_max": speed(offload),
        "onload_gb_per_s_min_median_max": speed(onload),
        "plain_to_host_gb_per_s_min_median_max": speed(to_host),
        "plain_to_device_gb_per_s_min_median_max": speed(to_device),
        "hidden_share_of_offload": hidden_share(both_offload, alone, offload),
        "hidden_share_of_onload": hidden_share(both_onload, alone, onload),
    }


def size_of(tensors: list[Tensor]) -> int:
    """Bytes of all tensors."""
    return sum(tensor.nbytes for tensor in tensors)


def hidden_share(both: list[float], compute: float, move: list[float]) -> float:
    """Of a move's own time, the share by which it did not prolong the computation."""
    longer = statistics.median(both) - compute
    return round(1 - longer / statistics.median(move), 3)


def products_lasting(seconds: float, device: torch.device) -> Callable[[], None]:
    """Matrix products that keep the device busy for about as long."""
    side, dtype = (512, torch.float32) if device.type == "cpu" else (8192, torch.bfloat16)
    left = torch.ones(side, side, device=device, dtype=dtype)
    out = torch.empty_like(left)
    one = statistics.median(seconds_per_call(lambda: torch.mm(left, left, out=out)))
    count = max(1, round(seconds / one))

    def products() -> None:
        for _ in range(count):
            torch.mm(left, left, out=out)

    return products


def plain_copies(size: int, device: torch.device, repeats: int) -> tuple[list[float], list[float]]:
    """Seconds of one copy of as many bytes (at most 2 GiB at a time), to the host and back."""
    part = min(size, 1 << 31)
    host = torch.empty(part, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.ones(part, dtype=torch.uint8, device=device)
    to_host = seconds_per_call(lambda: host.copy_(there, non_blocking=True), repeats=repeats)
    to_device = seconds_per_call(lambda: there.copy_(host, non_blocking=True), repeats=repeats)
    return [s * size / part for s in to_host], [s * size / part for s in to_device]


if __name__ == "__main__":
    main()
