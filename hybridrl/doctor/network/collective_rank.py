"""One rank of network.collective: python -m hybridrl.doctor.network.collective_rank ORDER.

Joins the process group like a worker, sums over all ranks, and prints one line of JSON for each
step; the last line has the measurements.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import chain
from threading import Timer
from typing import Any

import torch
from torch import distributed as dist

from hybridrl.doctor.network.bandwidth import rounds_of

# Seconds for one collective.
TIMEOUT_S = 15.0
SMALL = 1
# float32 numbers: 16 MiB over gloo, 256 MiB over NCCL.
LARGE = {"cpu": 4 * 2**20, "cuda": 64 * 2**20}
REPEATS = {"cpu": 3, "cuda": 10}
# float32 numbers between two GPUs: 64 MiB.
SENT = 16 * 2**20
# Of pairs: enough repeats to exclude other load, because pairs are compared.
PAIR_REPEATS, TRIP_REPEATS = 10, 50


def main() -> None:
    """Run one order, a `RankOrder` as JSON."""
    order = json.loads(sys.argv[1])
    meet, timeout = timedelta(seconds=order["meet_s"]), timedelta(seconds=TIMEOUT_S)
    _report("connecting to the store")
    store = dist.TCPStore(
        order["address"],
        order["port"],
        order["world_size"],
        is_master=order["rank"] == 0,
        timeout=meet,
        wait_for_workers=False,
        master_listen_fd=order["listen_fd"],
    )
    _report("waiting for the other ranks at the store")
    store.set(f"here/{order['rank']}", "1")
    store.wait([f"here/{rank}" for rank in range(order["world_size"])], meet)
    store.set_timeout(timeout)
    _end_after(order["limit_s"])
    _report("forming the process group")
    dist.init_process_group(
        "gloo",
        store=store,
        rank=order["rank"],
        world_size=order["world_size"],
        timeout=timeout,
    )
    measured: dict[str, Any] = {"gloo": _all_reduce("gloo", "cpu", dist.group.WORLD)}
    if order["device"] is not None:
        measured |= _over_nccl(order, timeout)
    _report("waiting until all are done")  # some ranks measure no pairs
    dist.monitored_barrier(timeout=timedelta(seconds=order["limit_s"]))
    _report("done", **measured)
    dist.destroy_process_group()


def _end_after(seconds: float) -> None:
    """Exit after so many seconds, even if a call hangs."""

    def end() -> None:
        sys.stderr.write(f"TimeoutError: still waiting after {seconds:.0f} s\n")
        sys.stderr.flush()
        os._exit(1)

    timer = Timer(seconds, end)
    timer.daemon = True
    timer.start()


def _over_nccl(order: dict[str, Any], timeout: timedelta) -> dict[str, Any]:
    """Measure an all-reduce over all GPUs, and pairs of GPUs."""
    device = torch.device("cuda", order["device"])
    _report(f"starting NCCL on GPU {device.index}")
    torch.cuda.set_device(device)
    # With device_id the group connects now.
    world = dist.new_group(backend="nccl", timeout=timeout, device_id=device)
    measured = {"nccl": _all_reduce("NCCL over all GPUs", "cuda", world)}
    return measured | {"nccl_from": pairs(order["rank"], order["nodes"], "cuda", world)}


def pairs(rank: int, nodes: Sequence[Sequence[int]], device: str, group: Any) -> dict[str, Any]:
    """Measure the speeds of all senders to this rank, by their number."""
    received = {}
    small, large = torch.ones(SMALL, device=device), torch.ones(SENT, device=device)

    def measured(other: int, first: Callable[..., Any], second: Callable[..., Any]) -> list[float]:
        """Return seconds of a round trip, and of a large message by the second way."""

        def trip() -> None:
            first(small, other, group=group)
            second(small, other, group=group)

        def message() -> None:
            second(large, other, group=group)

        return [_seconds(trip, device, TRIP_REPEATS), _seconds(message, device, PAIR_REPEATS)]

    for sender, receiver in chain.from_iterable(rounds_of(nodes)):
        if rank == sender:
            _report(f"NCCL: send to rank {receiver}")
            measured(receiver, dist.recv, dist.send)
        elif rank == receiver:
            _report(f"NCCL: receive from rank {sender}")
            trip_s, sent_s = measured(sender, dist.send, dist.recv)
            speed = {"round_trip_s": trip_s, "bytes_per_s": large.nbytes / sent_s}
            received[str(sender)] = speed
    return received


def _all_reduce(what: str, device: str, group: Any) -> dict[str, float]:
    """Measure seconds of a small sum, and bytes per second that a rank sends in a large one."""
    ranks, repeats = dist.get_world_size(group), REPEATS[device]
    _report(f"all-reduce: {what}")
    small, large = torch.ones(SMALL, device=device), torch.ones(LARGE[device], device=device)
    dist.all_reduce(small, group=group)
    if not bool((small == ranks).all()):
        raise RuntimeError(f"the sum of {ranks} ones is {small.tolist()}")
    latency_s = _seconds(lambda: dist.all_reduce(small, group=group), device, repeats)
    seconds = _seconds(lambda: dist.all_reduce(large, group=group), device, repeats)
    moved = 2 * (ranks - 1) / ranks * large.nbytes  # each rank sends this in a ring
    return {"latency_s": latency_s, "bytes_per_s": moved / seconds}


def _seconds(collective: Callable[[], Any], device: str, repeats: int) -> float:
    """Return the shortest of several calls, after one that makes connections."""
    synchronize = torch.cuda.synchronize if device == "cuda" else torch.cpu.synchronize
    collective()
    times = []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        collective()
        synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


def _report(step: str, **measured: Any) -> None:
    sys.stdout.write(json.dumps({"step": step} | measured) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
