"""How near to the links and the memory does moving the actor's weights into vLLM come?

Question   How long does a reshard take, beside what the hardware allows and beside the usual path?
Workload   Qwen2 shapes, or Qwen3-30B-A3B's, OLMoE-1B-7B's or gpt-oss-20b's with their experts,
           sliced or (--expert-parallel) whole on a rank. Random float32
           weights (norms and biases too) as FSDP2 shards, moved into a real vLLM's bfloat16
           parameters by a rollout worker's own resharder. The usual path comes first, from the
           same weights cut by rows; then its policy is freed. Beside vLLM's parameters a rank so
           holds a copy of them, and one policy's shards at a time.
Measures   Milliseconds of the slowest rank, each repetition begun together:
             sync           the resharder's whole call, one timed region, which is compared; its
                            parts are prepare (look up addresses, take staging memory), wait
                            (until all have) and move (cast, exchange, write in place)
             sync_verified  the same with fingerprints, and comparing them (verify)
             usual          full_tensor() of each parameter, then vLLM's load_weights: the faster
                            of gathering float32 and of casting first
           floor = max(6 bytes * elements cast / copy bandwidth, bytes received / all-gather
           bandwidth) of the slowest rank, with both bandwidths measured in the same run: a large
           cast copy float32 -> bfloat16, and the best of all-gathers of several sizes among the
           ranks that hold parts of one tensor-parallel slice. Extra memory is the peak during a
           sync, in buckets. Every parameter must equal the usual path's, bit for bit; else the
           exit code is 1. FP8 weights have no usual path: vLLM's loader would not meet them.
Run        python benchmarks/reshard.py --gpus 4 --tp 4 --model-size 7b               (GPUs)
           python benchmarks/reshard.py --gpus 4 --tp 2 --model-size 7b --layout plain
           python benchmarks/reshard.py --gpus 2 --tp 2 --model-size 30b-a3b            (H200s)
           python benchmarks/reshard.py --gpus 1 --tp 1 --model-size 7b --weights fp8
           python benchmarks/reshard.py --gpus 2 --tp 2 --small                      (CPU, seconds)

Prints one JSON line; append it to benchmarks/results/reshard.jsonl.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import shapes
from benchmarks.configs import composed
from benchmarks.timing import (
    largest_on_any_rank,
    min_median_max,
    result,
    seconds_of_slowest,
    seconds_per_call,
)
from benchmarks.usual_sync import UsualPath, forget, random_policy, usual_path, written
from hybridrl.config.choices import Layout, RolloutWeights
from hybridrl.config.planner.multicast import turn_off_multicast
from hybridrl.config.schema import RunConfig
from hybridrl.distributed.forward.token_models import TokenLogProbs
from hybridrl.distributed.mesh import build_mesh
from hybridrl.distributed.regions import NamedShard, named_shards
from hybridrl.rollout.engine import EnginePart
from hybridrl.workers.rollout import RolloutWorker

SHAPES = shapes.SHAPES | {
    "tiny": shapes.TINY,
    "tiny_experts": shapes.TINY_EXPERTS,
    "tiny_gpt_oss": shapes.TINY_GPT_OSS,
}


class Actor:
    """Stands where the actor's worker would: it has weights."""

    def __init__(self, policy: TokenLogProbs) -> None:
        self.policy = policy

    def named_shards(self) -> list[NamedShard]:
        """This rank's shards."""
        return named_shards(self.policy)


def main() -> None:
    """Start the ranks; print what rank 0 found, and fail if a parameter differs."""
    args = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_model_config(args.model_size)))
        mp.spawn(_rank, (args, Path(folder)), nprocs=args.gpus)
        line = (Path(folder) / "result.json").read_text()
    print(line)
    differing = json.loads(line)["measured"].get("differing_parameters", [])
    if any(differing):
        raise SystemExit(f"not what vLLM's loader wrote, by rank: {differing}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gpus", type=int, default=2, help="ranks; on a CPU its processes")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--model-size", choices=SHAPES, default="7b")
    parser.add_argument("--layout", choices=[layout.value for layout in Layout], default="aligned")
    weights = [weights.value for weights in RolloutWeights]
    parser.add_argument("--weights", choices=weights, default="dtype")
    parser.add_argument("--expert-parallel", action="store_true", help="experts whole")
    parser.add_argument("--bucket-mb", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--small", action="store_true", help="a tiny model, for a CPU")
    args = parser.parse_args()
    if args.small:
        small = {"qwen2": "tiny", "gpt_oss": "tiny_gpt_oss"}
        args.model_size = small.get(SHAPES[args.model_size]["model_type"], "tiny_experts")
        args.bucket_mb, args.repeats = 1, 3
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
    turn_off_multicast()
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
    torch.cuda.empty_cache()  # vLLM looks at what is free
    config = _config(args, folder)
    mesh = build_mesh(config.fsdp, device_type)
    worker = RolloutWorker(config.rollout, mesh)
    worker.engine.wake(EnginePart.WEIGHTS)
    is_fp8 = config.rollout.weights is RolloutWeights.fp8
    usual = None if is_fp8 else usual_path(config, worker.engine, device_type)
    actor = _connect(config, mesh, worker)
    found = _measure(args, worker, actor, bandwidths)
    if usual is not None:
        found |= _compared(worker, usual)
        usual_s = min(statistics.median(seconds) for seconds in usual.seconds.values())
        own_ms = found["sync_ms"][1] + found.get("load_ms", [0.0, 0.0])[1]
        found["times_faster_than_usual"] = round(1e3 * usual_s / own_ms, 1)
    if rank == 0:
        line = result("reshard", vars(args), bandwidths | found)
        (folder / "result.json").write_text(json.dumps(line))
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


def _connect(config: RunConfig, mesh: DeviceMesh, worker: RolloutWorker) -> Actor:
    """The actor with the usual path's weights, cut as the layout says, and the worker's plan."""
    spec = replace(config.fsdp, columns=worker.columns(config.fsdp))
    actor = Actor(random_policy(config, spec, mesh))
    worker.connect({"actor": actor})
    forget(worker.engine)
    return actor


def _config(args: argparse.Namespace, folder: Path) -> RunConfig:
    """Actor and engine that the command line asks for, in bfloat16 on CPUs too."""
    values = {
        "hardware": "gpu",
        "cluster.gpus_per_node": args.gpus,
        "model.path": folder,
        "model.init": "random",
        "fsdp.layout": args.layout,
        "fsdp.compile": False,
        "rollout.weights": args.weights,
        "rollout.expert_parallel": args.expert_parallel,
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
    received = parts.pop("received_bytes")[0]
    floor = _floor(actor, received, bandwidths)
    sync_s = statistics.median(sync)
    loads = {}
    if worker.engine.trace.loaded:  # with which vLLM's loader computes, after a sync
        seconds = seconds_of_slowest(worker.engine.sync, warmup=1, repeats=args.repeats)
        loads["load_ms"] = min_median_max(seconds, 1e3)
    return loads | {
        "sync_ms": min_median_max(sync, 1e3),
        "sync_parts_ms": _parts_ms(parts),
        "sync_verified_ms": min_median_max(verified, 1e3),
        "sync_verified_parts_ms": _parts_ms(verified_parts),
        "received_bytes": received,
        "floor_ms": round(1e3 * floor, 3),
        "times_floor": round(sync_s / floor, 2),
        "extra_memory_buckets": round(extra / (args.bucket_mb << 20), 2),
    }


def _compared(worker: RolloutWorker, usual: UsualPath) -> dict[str, Any]:
    """The usual path's times, and what of its parameters is not what the last sync wrote."""
    differing = [
        name
        for name, tensor in written(worker.engine).items()
        if not torch.equal(tensor.view(torch.int16), usual.parameters[name].view(torch.int16))
    ]
    wrong: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(wrong, differing)
    return {
        "usual_ms": {how: min_median_max(times, 1e3) for how, times in usual.seconds.items()},
        "parameters": len(usual.parameters),
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
    return seconds, {name: largest_on_any_rank([one[name] for one in timed]) for name in timed[0]}


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
    return largest_on_any_rank([max(floors)])[0]


def _extra_bytes(function: Callable[[], object]) -> int:
    """Peak of allocated device memory during a call, above what was there before; 0 on a CPU."""
    if not torch.cuda.is_available():
        function()
        return 0
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return torch.cuda.max_memory_allocated() - before


if __name__ == "__main__":
    main()
