"""Runs a function on several ranks: real processes, a real process group, a time limit."""

import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing import ProcessRaisedException

# Imported once by the server that ranks are forked from: seconds saved per rank.
PRELOADED = [
    "torch",
    "torch.distributed.fsdp",
    "transformers.models.auto.modeling_auto",
    "hybridrl.workers.actor",
]
PRELOADED_FOR_CUDA = 2
# What gloo says, once in thousands of starts, where a connection within the host is refused
# (https://github.com/pytorch/pytorch/issues/53270). No line under test has run by then.
NOT_CONNECTED = "Gloo connectFullMesh failed"


class RanksDidNotMeet(Exception):
    """The process group of `run_on_ranks` itself could not be connected."""


def run_on_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    device_type: str = "cpu",
    time_limit_s: float = 240.0,
) -> list[Any]:
    """What `function(*args)` returns on each of `num_ranks` ranks, in rank order.

    The process group is initialised (gloo; and NCCL for "cuda", where rank r takes GPU r), and
    every rank has one thread. Ranks meet through a file, so no port can be taken twice.

    Args:
        function: a module's function, since it travels by name.
        num_ranks: processes.
        args: given to every rank; must be picklable.
        device_type: "cpu" or "cuda".
        time_limit_s: for all of it.

    Ranks that did not meet are started once more.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank raised; with its traceback.
        TimeoutError: the ranks were not done in time; they are killed.
    """
    limits = device_type, time_limit_s
    try:
        return _run(function, num_ranks, args, *limits)
    except ProcessRaisedException as error:
        if RanksDidNotMeet.__name__ not in str(error):
            raise
    return _run(function, num_ranks, args, *limits)


def _run(
    function: Callable[..., Any],
    num_ranks: int,
    args: tuple[Any, ...],
    device_type: str,
    time_limit_s: float,
) -> list[Any]:
    forkserver = mp.get_context("forkserver")
    # Importing transformers' models touches CUDA, after which a fork cannot use it.
    preloaded = PRELOADED if device_type == "cpu" else PRELOADED[:PRELOADED_FOR_CUDA]
    forkserver.set_forkserver_preload(preloaded)
    all_done = forkserver.Barrier(num_ranks)
    deadline = time.monotonic() + time_limit_s
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(
            _run_rank,
            (function, num_ranks, args, device_type, folder, all_done, time_limit_s),
            nprocs=num_ranks,
            join=False,
            start_method="forkserver",
        )
        try:
            while not context.join(timeout=max(deadline - time.monotonic(), 0.0)):
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"{num_ranks} ranks were not done in {time_limit_s} s")
        finally:
            for process in context.processes:
                process.kill()
                process.join()
        return [
            torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(num_ranks)
        ]


def _run_rank(
    rank: int,
    function: Callable[..., Any],
    num_ranks: int,
    args: tuple[Any, ...],
    device_type: str,
    folder: str,
    all_done: Barrier,
    time_limit_s: float,
) -> None:
    torch.set_num_threads(1)
    if device_type == "cuda":
        torch.cuda.set_device(rank)
    try:
        dist.init_process_group(
            "gloo" if device_type == "cpu" else "cpu:gloo,cuda:nccl",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=time_limit_s),
            device_id=None if device_type == "cpu" else torch.device("cuda", rank),
        )
    except RuntimeError as error:
        if NOT_CONNECTED in str(error):
            raise RanksDidNotMeet(str(error)) from error
        raise
    torch.save(function(*args), Path(folder) / f"{rank}.pt")
    # Others may still be connecting a group to this rank: exiting now would break it for them.
    all_done.wait()
    if dist.is_initialized():  # vLLM destroys the group where an engine is collected
        dist.destroy_process_group()
