"""What share of a GPU's peak do scoring and training reach?

Question   How much of the dense bfloat16 peak do `ActorWorker.compute_log_probs` and `.update`
           reach, and what do unequal lengths cost?
Workload   Qwen2.5-1.5B's shape (tied, vocabulary 151,936; --shape), random weights, FSDP2 over all
           ranks, float32 masters, bfloat16 compute. Per rank and optimizer step 32 sequences of 256
           prompt tokens and 4,096 in all, or log-normal (--sigma) with the same total; 16,384
           tokens a micro-batch, or that times --ulysses on as many ranks, scheduled as the trainer
           does. One update is one optimizer step: AdamW, clipping and metrics included.
Measures   MFU by DESIGN's formula, (6 N + 6 L h S) operations per token over 989 TFLOP/s, a third
           of it forward; recomputation does not count. Tokens per second of all ranks. Peak memory
           of tensors, and of what the allocator held for them, beside what the planner predicts
           that a run's tensors take at most. Baseline in the same run: eager layers.
Run        python benchmarks/training.py                    (one H200)
           python benchmarks/training.py --ranks 4          (four)
           python benchmarks/training.py --ranks 4 --variants compiled --keep-gathered
                                                            (ranks wait for totals alone)
           python benchmarks/training.py --ranks 2 --ulysses 2 --variants compiled --sequences 4
               --length 32768 --lengths equal               (long ones, shared by two ranks)
           python benchmarks/training.py --small --ranks 2  (CPU, a minute; also --ulysses 2)

Prints one JSON line; append it to benchmarks/results/training.jsonl.
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.shapes import SHAPES
from benchmarks.timing import (
    largest_on_any_rank,
    min_median_max,
    result,
    seconds_per_call,
    wait_for_all,
)
from benchmarks.training_workload import (
    SMALL,
    Size,
    draw_lengths,
    random_batch,
    run_config,
)
from hybridrl.config.checks.sizes import sequence_head_problems, sequence_problems
from hybridrl.config.choices import Accumulation
from hybridrl.config.planner.flops import H100, forward_flops, training_flops
from hybridrl.config.planner.memory import rank_phases
from hybridrl.config.planner.model_shape import model_shape
from hybridrl.config.planner.multicast import turn_off_multicast
from hybridrl.config.planner.shape import ModelShape
from hybridrl.config.planner.world import data_shards
from hybridrl.config.schema import RunConfig
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.data.schedule import ScheduledBatch, UpdateSizes, schedule, update_sizes
from hybridrl.distributed.mesh import build_mesh
from hybridrl.workers.actor import ActorWorker

GIB = 2**30
# Phases of a step that are measured, as the planner names them.
MEASURED = ("score", "update actor")


def main() -> None:
    """Measure in one process per rank; print what rank 0 found."""
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        config = SMALL if arguments.small else SHAPES[arguments.shape]
        (Path(folder) / "config.json").write_text(json.dumps(config))
        _check(Path(folder), arguments)
        mp.spawn(_run_rank, (arguments, Path(folder)), nprocs=arguments.ranks)
        print((Path(folder) / "result.json").read_text())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--ulysses", type=int, default=1, help="ranks that share sequences")
    parser.add_argument("--small", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--sequences", type=int, default=32, help="per rank and optimizer step")
    parser.add_argument("--length", type=int, default=4096, help="mean tokens of a sequence")
    parser.add_argument("--max-tokens", type=int, default=16384, help="of a micro-batch, a rank")
    parser.add_argument("--chunk-tokens", type=int, default=4096, help="whose logits exist at once")
    parser.add_argument("--lengths", default="equal,lognormal", help="equal, lognormal")
    parser.add_argument("--variants", default="compiled,eager", help="layers: compiled, eager")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--keep-gathered", action="store_true", help="reshard_after_forward=false")
    parser.add_argument("--accumulation", default="full", choices=[a.value for a in Accumulation])
    parser.add_argument("--sigma", type=float, default=0.5, help="of log(length), log-normal")
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def _run_rank(rank: int, arguments: argparse.Namespace, folder: Path) -> None:
    device_type = "cpu" if arguments.small else "cuda"
    if arguments.small:
        torch.set_num_threads(1)
    else:
        # Multicast over NVLink can take a shared host's GPUs out of service.
        turn_off_multicast()
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "gloo" if arguments.small else "cpu:gloo,cuda:nccl",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=arguments.ranks,
    )
    shape = model_shape(json.loads((folder / "config.json").read_text()))
    size = _size(arguments)
    measured: dict[str, Any] = {}
    for variant in arguments.variants.split(","):
        config = _config(folder, arguments, compiled=variant == "compiled")
        batches = {
            name: random_batch(draw_lengths(name, arguments.ranks, size), size.prompt, shape.vocab)
            for name in arguments.lengths.split(",")
        }
        measured[variant] = _measure_variant(config, shape, batches, device_type, arguments.repeats)
        if rank == 0:
            print(variant, json.dumps(measured[variant]), file=sys.stderr, flush=True)
    if rank == 0:
        line = result("training", vars(arguments), measured)
        (folder / "result.json").write_text(json.dumps(line))
    dist.destroy_process_group()


def _size(arguments: argparse.Namespace) -> Size:
    """How much the command line asks for."""
    size = Size(
        arguments.sequences,
        arguments.length,
        256,
        arguments.max_tokens,
        arguments.chunk_tokens,
        arguments.sigma,
        arguments.ulysses,
    )
    if arguments.small:
        size = replace(size, sequences=4, length=64, prompt=8, max_tokens=128, chunk_tokens=32)
    return size


def _check(folder: Path, arguments: argparse.Namespace) -> None:
    """Exit if a run could not share sequences so, or micro-batches could not hold them."""
    config = _config(folder, arguments, compiled=False)
    shape = model_shape(json.loads((folder / "config.json").read_text()))
    problems = [*sequence_problems(config), *sequence_head_problems(config, shape)]
    try:
        for name in arguments.lengths.split(","):
            draw_lengths(name, arguments.ranks, _size(arguments))
    except ValueError as error:
        problems.append(str(error))
    if problems:
        raise SystemExit("\n".join(problems))


def _config(folder: Path, arguments: argparse.Namespace, *, compiled: bool) -> RunConfig:
    """The run whose actor the command line asks for."""
    fsdp = {
        "reshard_after_forward": not arguments.keep_gathered,
        "activation_checkpointing": arguments.checkpointing,
        "accumulation": arguments.accumulation,
        "compile": compiled,
    }
    size = _size(arguments)
    return run_config(folder, size, arguments.ranks, fsdp, on_gpu=not arguments.small)


def _measure_variant(
    config: RunConfig,
    shape: ModelShape,
    batches: dict[str, RolloutBatch],
    device_type: str,
    repeats: int,
) -> dict[str, Any]:
    actor = ActorWorker(config.actor, build_mesh(config.fsdp, device_type))
    sizes = update_sizes(config.actor, data_shards(config), shape)
    found: dict[str, Any] = {
        name: _measure(actor, batch, sizes, shape, repeats) for name, batch in batches.items()
    }
    if len(found) == 2:
        found["unequal_over_equal"] = round(
            found["lognormal"]["update_tokens_per_s"] / found["equal"]["update_tokens_per_s"], 3
        )
    found["memory_gib"] = _memory(config, shape)
    del actor
    gc.collect()  # FSDP2's states and their modules refer to each other
    if device_type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return found


def _measure(
    actor: ActorWorker,
    batch: RolloutBatch,
    sizes: UpdateSizes,
    shape: ModelShape,
    repeats: int,
) -> dict[str, Any]:
    """MFU, tokens per second and seconds of scoring and of one optimizer step."""
    dealt = schedule(batch, sizes, seed=1, step=1)
    old_log_probs = _gathered(dealt, actor.compute_log_probs(_mine(dealt)))
    mine = _mine(dealt.adding(old_log_probs=old_log_probs))
    first = actor.update(mine, 1, 0.0)
    score = seconds_per_call(lambda: actor.compute_log_probs(mine), warmup=1, repeats=repeats)
    update = seconds_per_call(lambda: actor.update(mine, 1, 0.0), warmup=1, repeats=repeats)
    num_tokens, peak = int(batch.num_tokens.sum()), H100.peak * dist.get_world_size()
    work = shape, *dealt.computed(sizes)
    score_s, update_s = statistics.median(score), statistics.median(update)
    return {
        "log_probs_mfu": round(forward_flops(*work) / score_s / peak, 4),
        "update_mfu": round(training_flops(*work) / update_s / peak, 4),
        "log_probs_tokens_per_s": round(num_tokens / score_s),
        "update_tokens_per_s": round(num_tokens / update_s),
        "log_probs_s_min_median_max": min_median_max(score),
        "update_s_min_median_max": min_median_max(update),
        "micro_batches": len(dealt.ranks[0][0][0]),
        "longest": int(batch.num_tokens.max()),
        "first_log_ratio_max": first["actor/first_log_ratio_max"],
    }


def _mine(dealt: ScheduledBatch) -> Any:
    """What this rank computes: consecutive ranks that share sequences have the same."""
    shards = len(dealt.ranks)
    return dealt.shard(shards)[dist.get_rank() * shards // dist.get_world_size()]


def _gathered(dealt: ScheduledBatch, mine: Ragged) -> Ragged:
    """Every shard's results, each from the first of its ranks, in the order of the batch."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return dealt.join(parts[:: len(parts) // len(dealt.ranks)])


def _memory(config: RunConfig, shape: ModelShape) -> dict[str, Any]:
    """What the planner predicts, and what tensors and the allocator took on the fullest rank."""
    plan = planned(config, shape)
    memory: dict[str, Any] = {name: round(size, 3) for name, size in plan.items()}
    if torch.cuda.is_available():
        wait_for_all()
        peaks = [torch.cuda.max_memory_allocated() / GIB, torch.cuda.max_memory_reserved() / GIB]
        most = max(plan.values())
        for name, peak in zip(("allocated", "reserved"), largest_on_any_rank(peaks), strict=True):
            memory |= {name: round(peak, 2), f"{name}_to_planned": round(peak / most, 3)}
    return memory


def planned(config: RunConfig, shape: ModelShape) -> dict[str, float]:
    """GiB of tensors by phase, as the validator counts them; without the process itself.

    vLLM sleeps in these phases, so that no size of a GPU matters.
    """
    phases = [phase for phase in rank_phases(config, shape, 0) if phase.name in MEASURED]
    assert len(phases) == len(MEASURED), phases
    return {
        f"planned_{phase.name.replace(' ', '_')}": (phase.total - phase.parts["process"]) / GIB
        for phase in phases
    }


if __name__ == "__main__":
    main()
