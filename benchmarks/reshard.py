"""How near to the links and the memory does moving the actor's weights into vLLM come?

Question   How long does a reshard take, beside what the hardware allows and beside the usual path?
Workload   Qwen2 shapes, random float32 weights (norms and biases too) as FSDP2 shards, moved into a
           real vLLM's bfloat16 parameters by a rollout worker's own resharder.
Measures   Milliseconds of the slowest rank, each repetition begun together:
             sync           the resharder's whole call, one timed region, which is compared; its
                            parts are prepare (look up addresses, take staging memory) and move
                            (cast, exchange, write in place)
             sync_verified  the same with fingerprints and comparing them: prepare, move, verify
             usual          full_tensor() of each parameter, then vLLM's load_weights: the faster
                            of gathering float32 and of casting first
           floor = max(6 bytes * elements cast / copy bandwidth, bytes received / all-gather
           bandwidth) of the slowest rank, with both bandwidths measured in the same run: a large
           cast copy float32 -> bfloat16, and the best of all-gathers of several sizes among the
           ranks that hold parts of one tensor-parallel slice. Extra memory is the peak during a
           sync, in buckets. Every parameter must equal the usual path's, bit for bit.
Run        python benchmarks/reshard.py --gpus 4 --tp 4 --model-size 7b               (GPUs)
           python benchmarks/reshard.py --gpus 4 --tp 2 --model-size 7b --layout plain
           python benchmarks/reshard.py --gpus 2 --tp 2 --small                      (CPU, seconds)

Prints one JSON line; paste it, with the command, into benchmarks/RESULTS.md.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.configs import composed
from benchmarks.shapes import QWEN2_5, TINY
from benchmarks.timing import (
    hardware,
    min_median_max,
    seconds_of_slowest,
    seconds_per_call,
    slowest,
)
from hybridrl.config.choices import Layout
from hybridrl.config.schema import RunConfig
from hybridrl.distributed.fsdp import load_sharded_policy, named_shards
from hybridrl.distributed.mesh import build_mesh
from hybridrl.distributed.shards import NamedShard
from hybridrl.distributed.token_models import TokenLogProbs
from hybridrl.rollout import compat
from hybridrl.rollout.engine import EnginePart
from hybridrl.workers.rollout import RolloutWorker

SHAPES = QWEN2_5 | {"tiny": TINY}


class Actor:
    """Stands where the actor's worker would: it has weights."""

    def __init__(self, policy: TokenLogProbs) -> None:
        self.policy = policy

    def named_shards(self) -> list[NamedShard]:
        """This rank's shards."""
        return named_shards(self.policy)


def main() -> None:
    """Start the ranks; rank 0 prints one JSON line."""
    args = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_model_config(args.model_size)))
        mp.spawn(_rank, (args, Path(folder)), nprocs=args.gpus)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gpus", type=int, default=2, help="ranks; on a CPU its processes")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--model-size", choices=SHAPES, default="7b")
    parser.add_argument("--layout", choices=[layout.value for layout in Layout], default="aligned")
    parser.add_argument("--bucket-mb", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--small", action="store_true", help="a tiny model, for a CPU")
    args = parser.parse_args()
    if args.small:
        args.model_size, args.bucket_mb, args.repeats = "tiny", 1, 3
    return args


def _model_config(size: str) -> dict[str, Any]:
    return SHAPES[size] | {
        "max_position_embeddings": 4096,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
    }


def _rank(rank: int, args: argparse.Namespace, folder: Path) -> None:
    """What one rank does."""
    on_gpu = torch.cuda.is_available()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(args.gpus))
    os.environ.update(compat.NO_MULTICAST)
    os.environ["VLLM_RPC_BASE_PATH"] = str(folder)  # its sockets would stay otherwise
    if on_gpu:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=args.gpus,
        timeout=timedelta(minutes=5),
        device_id=torch.device("cuda", rank) if on_gpu else None,
    )
    device_type = "cuda" if on_gpu else "cpu"
    bandwidths = _bandwidths(args, device_type)
    worker, actor = _build(args, folder, device_type)
    result = hardware() | vars(args) | bandwidths | _measure(args, worker, actor, bandwidths)
    if rank == 0:
        print(json.dumps({"bench": "reshard"} | result), flush=True)
    dist.barrier()
    os._exit(0)  # vLLM and the process group end in either order only with warnings


def _bandwidths(args: argparse.Namespace, device_type: str) -> dict[str, float]:
    """Bytes per second of a cast copy (read and written) and of an all-gather (received)."""
    numel = 1 << (20 if args.small else 30)
    target = torch.empty(numel, dtype=torch.bfloat16, device=device_type)
    bandwidths = {"copy_bandwidth": _copy_bandwidth(target), "all_gather_bandwidth": 0.0}
    groups = [dist.new_group(list(range(t, args.gpus, args.tp))) for t in range(args.tp)]
    group, parts = groups[dist.get_rank() % args.tp], args.gpus // args.tp
    if parts == 1:
        return bandwidths
    for share in (4, 2, 1):
        gathered = target[: numel // share]
        own = target.new_empty(len(gathered) // parts)

        def gather(gathered: Tensor = gathered, own: Tensor = own) -> None:
            dist.all_gather_into_tensor(gathered, own, group=group)

        seconds = statistics.median(seconds_per_call(gather))
        best = max(bandwidths["all_gather_bandwidth"], (parts - 1) * own.nbytes / seconds)
        bandwidths["all_gather_bandwidth"] = best
    return bandwidths


def _copy_bandwidth(target: Tensor) -> float:
    source = torch.empty(target.shape, device=target.device)
    seconds = seconds_per_call(lambda: target.copy_(source))
    return (source.nbytes + target.nbytes) / statistics.median(seconds)


def _build(args: argparse.Namespace, folder: Path, device_type: str) -> tuple[RolloutWorker, Actor]:
    """The rollout worker, connected to an actor whose every weight is a random number."""
    if device_type == "cuda":
        torch.cuda.empty_cache()
    config = _config(args, folder)
    spec = config.fsdp
    mesh = build_mesh(spec, device_type)
    worker = RolloutWorker(config.rollout, mesh)
    spec = replace(spec, columns=worker.columns(spec))
    actor = Actor(load_sharded_policy(config.model, spec, mesh, chunk_tokens=1024))
    generator = torch.Generator(device_type).manual_seed(dist.get_rank())
    for shard in actor.named_shards():
        shard.local().normal_(generator=generator)
    worker.connect({"actor": actor})
    worker.engine.wake(EnginePart.WEIGHTS)
    return worker, actor


def _config(args: argparse.Namespace, folder: Path) -> RunConfig:
    """Actor and engine that the command line asks for, in bfloat16 on CPUs too."""
    values = {
        "hardware": "gpu",
        "cluster.gpus_per_node": args.gpus,
        "model.path": folder,
        "model.init": "random",
        "fsdp.layout": args.layout,
        "fsdp.compile": False,
        "rollout.tensor_parallel_size": args.tp,
        "rollout.max_prompt_tokens": 64,
        "rollout.max_response_tokens": 64,
        "rollout.kv_cache_mb": 64,
        "rollout.max_num_seqs": 8,
        "rollout.enforce_eager": True,
        "rollout.reshard_bucket_mb": args.bucket_mb,
    }
    return composed(values)


def _measure(
    args: argparse.Namespace,
    worker: RolloutWorker,
    actor: Actor,
    bandwidths: dict[str, float],
) -> dict[str, Any]:
    """All times, compared."""
    sync, parts = _syncs(worker, args.repeats, verify=False)
    verified, verified_parts = _syncs(worker, args.repeats, verify=True)
    extra = _extra_bytes(lambda: worker.resharder.sync(0, verify=True))
    moved = {name: tensor.clone() for name, tensor in worker.engine.tensors().items()}
    usual = {
        how: _usual(worker, actor, cast_first=how == "cast_first")
        for how in ("float32", "cast_first")
    }
    differing = [
        name
        for name, tensor in worker.engine.tensors().items()
        if not torch.equal(tensor.view(torch.int16), moved[name].view(torch.int16))
    ]
    wrong: list[Any] = [None] * args.gpus
    dist.all_gather_object(wrong, differing)
    received = parts.pop("received_bytes")[0]
    floor = _floor(actor, received, bandwidths)
    sync_s = statistics.median(sync)
    usual_s = min(statistics.median(seconds) for seconds in usual.values())
    return {
        "sync_ms": min_median_max(sync, 1e3),
        "sync_parts_ms": _parts_ms(parts),
        "sync_verified_ms": min_median_max(verified, 1e3),
        "sync_verified_parts_ms": _parts_ms(verified_parts),
        "received_bytes": received,
        "floor_ms": round(1e3 * floor, 3),
        "times_floor": round(sync_s / floor, 2),
        "usual_ms": {how: min_median_max(seconds, 1e3) for how, seconds in usual.items()},
        "times_faster_than_usual": round(usual_s / sync_s, 1),
        "extra_memory_buckets": round(extra / (args.bucket_mb << 20), 2),
        "parameters": len(moved),
        "differing_parameters": wrong,
    }


def _syncs(
    worker: RolloutWorker, repeats: int, *, verify: bool
) -> tuple[list[float], dict[str, list[float]]]:
    """Seconds of each repetition, after three others, and of each what the sync itself reports."""
    reported: list[dict[str, float]] = []
    seconds = seconds_of_slowest(
        lambda: reported.append(worker.resharder.sync(len(reported), verify=verify)),
        warmup=3,
        repeats=repeats,
    )
    timed = reported[-repeats:]
    return seconds, {name: slowest([one[name] for one in timed]) for name in timed[0]}


def _parts_ms(reported: dict[str, list[float]]) -> dict[str, list[float]]:
    """Each part's smallest, median and largest time; that of a part's slowest rank."""
    return {
        name.removesuffix("_s"): min_median_max(seconds, 1e3)
        for name, seconds in reported.items()
        if name.endswith("_s")
    }


def _floor(actor: Actor, received: float, bandwidths: dict[str, float]) -> float:
    """Seconds that the slowest rank would need at full bandwidth."""
    storages = {shard.local().data_ptr(): shard.local().numel() for shard in actor.named_shards()}
    floors = [6 * sum(storages.values()) / bandwidths["copy_bandwidth"]]
    if bandwidths["all_gather_bandwidth"]:
        floors.append(received / bandwidths["all_gather_bandwidth"])
    return slowest([max(floors)])[0]


def _extra_bytes(function: Callable[[], object]) -> int:
    """Peak of allocated device memory during a call, above what was there before; 0 on a CPU."""
    if not torch.cuda.is_available():
        function()
        return 0
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return torch.cuda.max_memory_allocated() - before


def _usual(worker: RolloutWorker, actor: Actor, *, cast_first: bool) -> list[float]:
    """Seconds of gathering each parameter whole and giving it to vLLM's loader."""

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, parameter in actor.policy.lm.named_parameters():
            cast = parameter.detach().to(torch.bfloat16) if cast_first else parameter.detach()
            yield name, cast.full_tensor()  # type: ignore[attr-defined]

    for tensor in worker.engine.tensors().values():
        tensor.fill_(float("nan"))  # what a loader left out would show
    with torch.no_grad():
        return seconds_of_slowest(lambda: worker.engine.load(weights()), warmup=1, repeats=5)


if __name__ == "__main__":
    main()
