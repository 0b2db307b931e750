"""One rank of the doctor's program over torch.distributed: python -m ...network.rank ORDER.

All ranks take the same steps: meet at a store, form the process group like workers, measure pairs,
sum over all ranks. Each step is a line of JSON with its text and, of a pair, sender and receiver;
lines with other keys are measurements.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from hybridrl.doctor.network.ranks import RankOrder
from hybridrl.doctor.network.speeds import (
    GLOO,
    MAX_SHOWN,
    NCCL_BETWEEN,
    NCCL_WITHIN,
    Round,
    Speed,
    Way,
    rounds_between,
    rounds_within,
    suspects,
)

# Seconds for one collective or one message.
TIMEOUT_S = 15.0
# Round trips and repeats of a large sum; seconds for the large messages of a pair, and their most.
TRIPS, REPEATS, PAIR_S, MOST_MESSAGES = 20, 3, 0.2, 10


@dataclass(frozen=True)
class Fabric:
    """A process group of all ranks by its library, and float32 numbers of a large message."""

    name: str
    group: "dist.ProcessGroup | None"
    device: torch.device
    numbers: int

    def seconds(self, call: Callable[[], object], repeats: int = 1) -> float:
        """Return the time of the shortest of several calls."""
        on_gpu, times = self.device.type == "cuda", []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            if on_gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return min(times)


def main() -> None:
    """Run one order, a `RankOrder` as JSON."""
    order = RankOrder(*json.loads(sys.argv[1]))
    meet, timeout = timedelta(seconds=order.meet_s), timedelta(seconds=TIMEOUT_S)
    _step("connecting to the store")
    store = dist.TCPStore(
        order.address,
        order.port,
        order.world_size,
        is_master=order.rank == 0,
        timeout=meet,
        wait_for_workers=False,
        master_listen_fd=order.listen_fd,
    )
    _step("waiting for the other ranks at the store")
    store.set(f"here/{order.rank}", "1")
    store.wait([f"here/{rank}" for rank in range(order.world_size)], meet)
    store.set_timeout(timeout)
    _step("forming the process group")
    dist.init_process_group(
        "gloo", store=store, rank=order.rank, world_size=order.world_size, timeout=timeout
    )
    gloo = Fabric("gloo", None, torch.device("cpu"), 2**20)
    measure_pairs(GLOO, rounds_between(order.nodes), gloo, order.limit_s)
    _all_reduce(gloo)
    if order.device is not None:
        device = torch.device("cuda", order.device)
        _step(f"starting NCCL on GPU {device.index}")
        torch.cuda.set_device(device)
        # With device_id the group connects now.
        world = dist.new_group(backend="nccl", timeout=timeout, device_id=device)
        nccl = Fabric("NCCL", world, device, 16 * 2**20)
        _all_reduce(nccl)
        measure_pairs(NCCL_WITHIN, rounds_within(order.nodes), nccl, order.limit_s)
        measure_pairs(NCCL_BETWEEN, rounds_between(order.nodes), nccl, order.limit_s)
    _step("waiting until all are done")
    dist.monitored_barrier(timeout=timedelta(seconds=order.limit_s))
    dist.destroy_process_group()


def measure_pairs(way: Way, rounds: Sequence[Round], fabric: Fabric, limit_s: float) -> None:
    """Measure all pairs, and the slow ones a second time alone; print those sent to this rank.

    Ranks without a pair wait up to `limit_s` for the others.
    """
    speeds: dict[tuple[int, int], Speed] = {}

    def measure(pairs: Round) -> None:
        """Measure pairs at the same time; keep the better values, to exclude other load."""
        rank = dist.get_rank()
        pair = next((pair for pair in pairs if rank in pair), None)
        if pair is None:
            _step(f"{fabric.name}: waiting for other pairs")
            return
        _step(f"{fabric.name}: rank {pair[0]} to rank {pair[1]}", pair=pair, check=way.check)
        new = _exchange(fabric, *pair)
        if rank == pair[1]:
            old = speeds.get(pair, new)
            trip_s, rate = zip(new, old, strict=True)
            speeds[pair] = Speed(min(trip_s), max(rate))

    for pairs in rounds:
        measure(pairs)
    if rounds:
        _step(f"{fabric.name}: comparing all pairs")
        dist.monitored_barrier(timeout=timedelta(seconds=limit_s))
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, speeds)
        together = {pair: speed for each in everyone for pair, speed in each.items()}
        for pair in suspects(together)[:MAX_SHOWN]:
            measure([pair])
        dist.monitored_barrier(timeout=timedelta(seconds=limit_s))
    _print({way.key: [[*pair, *speed] for pair, speed in speeds.items()]})


def _exchange(fabric: Fabric, sender: int, receiver: int) -> Speed:
    """Measure round trips, and large messages that the receiver chooses to take."""
    is_sender = dist.get_rank() == sender
    other = receiver if is_sender else sender
    first, second = (dist.recv, dist.send) if is_sender else (dist.send, dist.recv)
    small, large = (torch.ones(size, device=fabric.device) for size in (1, fabric.numbers))

    def trip() -> None:
        first(small, other, group=fabric.group)
        second(small, other, group=fabric.group)

    def message() -> None:
        second(large, other, group=fabric.group)

    trip_s = fabric.seconds(trip, TRIPS)
    warm_s = fabric.seconds(message)
    small.fill_(max(1, min(MOST_MESSAGES, int(PAIR_S / warm_s))))
    first(small, other, group=fabric.group)
    sent_s = fabric.seconds(message, int(small.item()))
    return Speed(trip_s, large.nbytes / sent_s)


def _all_reduce(fabric: Fabric) -> None:
    """Print seconds of a small sum, and bytes per second that a rank sends in a large one."""
    ranks = dist.get_world_size()
    _step(f"all-reduce: {fabric.name} over all ranks")
    small, large = (torch.ones(size, device=fabric.device) for size in (1, 4 * fabric.numbers))
    dist.all_reduce(small, group=fabric.group)
    if not bool((small == ranks).all()):
        raise RuntimeError(f"the sum of {ranks} ones is {small.tolist()}")
    latency_s = fabric.seconds(lambda: dist.all_reduce(small, group=fabric.group), REPEATS)
    seconds = fabric.seconds(lambda: dist.all_reduce(large, group=fabric.group), REPEATS)
    moved = 2 * (ranks - 1) / ranks * large.nbytes  # each rank sends this in a ring
    _print({fabric.name: {"latency_s": latency_s, "bytes_per_s": moved / seconds}})


def _step(text: str, *, pair: tuple[int, int] | None = None, check: str = "") -> None:
    _print({"step": text, "pair": pair, "check": check})


def _print(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
