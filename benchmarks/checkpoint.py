"""How long does a checkpoint hold training up?

Question   For how long does training wait while a checkpoint is taken, how long does it then take
           to be written, and is training slower meanwhile?
Workload   Qwen2.5-7B's shape (7.6 B parameters), random weights, FSDP2 over all ranks, float32
           masters and AdamW's moments: 91 GB in all. One update of a few sequences per rank between
           and during saves; the state is loaded again at the end.
Measures   Seconds that `SaverWorker.begin_save` takes (training waits for the copy to page-locked
           memory, not for the disk): first save, which may wait for the memory, and later ones.
           Seconds and GB/s of writing, SHA-256 included; of a load. Seconds of an update alone and
           during a save; loss and gradient norm of the update after the last save, and of the same
           update after the load. Baseline in the same run: one plain torch.save of the same shards
           by every rank, which is what training would wait for without a copy. One copy of the
           state is on the disk at a time.
Run        python benchmarks/checkpoint.py --ranks 4 --folder /local/disk    (four H200s)
           python benchmarks/checkpoint.py --small --ranks 2                 (CPU, seconds)

Prints one JSON line; append it to benchmarks/results/checkpoint.jsonl.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.shapes import QWEN2_5
from benchmarks.timing import result, seconds_of, wait_for_all
from benchmarks.training_workload import SMALL, Size, actor_config, draw_lengths, random_batch
from hybridrl.config.planner.model_shape import model_shape
from hybridrl.config.planner.multicast import turn_off_multicast
from hybridrl.config.planner.shape import ModelShape
from hybridrl.config.schema import SaverConfig
from hybridrl.data.ragged import Ragged
from hybridrl.data.schedule import RankBatch, schedule, update_sizes
from hybridrl.distributed.mesh import build_mesh
from hybridrl.workers.actor import ActorWorker
from hybridrl.workers.saver import SaverWorker

SIZE = Size(4, length=2048, prompt=256, max_tokens=8192, chunk_tokens=4096, sigma=0.5)
SMALL_SIZE = Size(4, length=64, prompt=8, max_tokens=128, chunk_tokens=32, sigma=0.5)


def main() -> None:
    """Measure in one process per rank; print what rank 0 found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--shape", default="7b", choices=sorted(QWEN2_5))
    parser.add_argument("--small", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write; default: temporary files")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        config = SMALL if arguments.small else QWEN2_5[arguments.shape]
        (Path(folder) / "config.json").write_text(json.dumps(config))
        mp.spawn(_run_rank, (arguments, Path(folder)), nprocs=arguments.ranks)
        print((Path(folder) / "result.json").read_text())


def _run_rank(rank: int, arguments: argparse.Namespace, folder: Path) -> None:
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
    shape = "small" if arguments.small else arguments.shape
    measured = _measure(folder, arguments)
    if rank == 0:
        line = result("checkpoint", {"ranks": arguments.ranks, "shape": shape}, measured)
        (folder / "result.json").write_text(json.dumps(line))
    dist.destroy_process_group()


def _measure(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    size = SMALL_SIZE if arguments.small else SIZE
    shape = model_shape(json.loads((folder / "config.json").read_text()))
    fsdp = {"activation_checkpointing": True, "accumulation": "sharded", "compile": False}
    config = actor_config(folder, size, arguments.ranks, fsdp, on_gpu=not arguments.small)
    mesh = build_mesh(config.fsdp, "cpu" if arguments.small else "cuda")
    actor = ActorWorker(config, mesh)
    told = SaverConfig(worker="hybridrl.workers.saver.SaverWorker", prepares=True)
    saver = SaverWorker(told, mesh)
    saver.connect({"actor": actor})
    batch = _batch(actor, shape, size, arguments.ranks)
    metrics: dict[str, float] = {}
    update = lambda: seconds_of(lambda: metrics.update(actor.update(batch, 1, 0.0)))  # noqa: E731
    update()
    alone = [update() for _ in range(3)]
    plain = _plain_save(actor, folder)
    blocked, during, written, num_bytes = [], [], [], 0
    target = folder / "save"
    for _ in range(arguments.saves):
        _remove(target)
        blocked.append(seconds_of(lambda: saver.begin_save(str(target))))
        during.append(update())
        saved = saver.finish_save()
        assert saved.error is None, saved.error
        written.append(saved.seconds)
        num_bytes = _total(sum(record.size for record in saved.files.values()))
        _tell(f"save: training waited {blocked[-1]:.2f} s, written in {written[-1]:.1f} s")
    undisturbed = dict(metrics)
    load = seconds_of(lambda: saver.load(str(target)))
    update()
    return {
        "gb": round(num_bytes / 1e9, 3),
        "blocked_s_first": round(blocked[0], 3),
        "blocked_s_later": [round(seconds, 3) for seconds in blocked[1:]],
        "write_s": [round(seconds, 2) for seconds in written],
        "write_gb_per_s": round(num_bytes / 1e9 / statistics.median(written), 2),
        "update_s_alone": round(statistics.median(alone), 3),
        "update_s_during_save": [round(seconds, 3) for seconds in during],
        "load_s": round(load, 2),
        "plain_torch_save_s": round(plain, 2),
        "next_update": {
            name: [undisturbed[name], metrics[name]] for name in ("actor/loss", "actor/grad_norm")
        },
    }


def _batch(actor: ActorWorker, shape: ModelShape, size: Size, ranks: int) -> RankBatch:
    """This rank's part of random responses, with log-probs of the actor's own."""
    sizes = update_sizes(actor.config, ranks, shape)
    whole = random_batch(draw_lengths("equal", ranks, size), size.prompt, shape.vocab)
    dealt = schedule(whole, sizes, seed=1, step=1)
    parts: list[Any] = [None] * ranks
    mine: Ragged = actor.compute_log_probs(dealt.shard(ranks)[dist.get_rank()])
    dist.all_gather_object(parts, mine)
    return dealt.adding(old_log_probs=dealt.join(parts)).shard(ranks)[dist.get_rank()]


def _plain_save(actor: ActorWorker, folder: Path) -> float:
    """Seconds of one torch.save by every rank, on the disk at its end."""
    path = folder / f"plain_{dist.get_rank()}.pt"
    seconds = seconds_of(lambda: _save(actor, path))
    path.unlink()
    _tell(f"plain torch.save: {seconds:.1f} s")
    return seconds


def _save(actor: ActorWorker, path: Path) -> None:
    local = {
        key: (tensor.to_local() if isinstance(tensor, DTensor) else tensor).cpu()
        for key, tensor in actor.training_state().items()
    }
    with path.open("wb") as file:
        torch.save(local, file)
        file.flush()
        os.fsync(file.fileno())


def _remove(folder: Path) -> None:
    wait_for_all()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    wait_for_all()


def _tell(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def _total(count: int) -> int:
    total = torch.tensor([count], dtype=torch.int64)
    dist.all_reduce(total)
    return int(total)


if __name__ == "__main__":
    main()
