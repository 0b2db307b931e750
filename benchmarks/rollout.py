"""How fast does a rollout worker generate, beside vLLM's own `LLM.generate`?

Question   What do seeds, log-probs and our way around vLLM's output processor cost or save?
Workload   One engine, random weights that never end a response: P prompts x n responses, prompts
           of equal length without common prefixes, responses of equal length. Defaults on a GPU:
           64 x 4, 256 + 256 tokens, bfloat16, CUDA graphs.
Measures   Sampled tokens/s, from the call to the whole result, with an empty prefix cache:
             worker  RolloutWorker.generate: a seed per response, log-probs, a RolloutBatch
             single  the same with rollout.num_scheduler_steps=1
             plain   LLM.generate with n responses per request: no seeds, no log-probs; the
                     scheduler is vLLM's own
             equal   LLM.generate with what the worker gives: seeds, log-probs of sampled tokens
             alone   as plain, by a vLLM as it comes: its engine in a process of its own, its
                     scheduler and its graphs; before the others start
           Repeats of the others alternate, after three rounds that do not count; medians with
           spread. Aim: worker at least 0.97 of plain and alone. A decoding step of the worker,
           without the prompts, beside its floor: the weights and the keys and values in the mean,
           read once at the bandwidth of a large copy on this GPU. Aim: 1.6 times the floor.
Run        python benchmarks/rollout.py --model smollm2_135m                      (one GPU)
           python benchmarks/rollout.py --shape qwen2.5-1.5b                      (one GPU)
           python benchmarks/rollout.py --shape qwen2.5-7b --weights fp8          (one GPU)
           torchrun --nproc-per-node 2 benchmarks/rollout.py --shape qwen2.5-1.5b --tp 2
           python benchmarks/rollout.py --small                                   (CPU, seconds)
           torchrun --nproc-per-node 2 benchmarks/rollout.py --small --tp 2       (CPU, seconds)

Prints one JSON line; append it to benchmarks/results/rollout.jsonl.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.configs import composed
from benchmarks.shapes import QWEN2_5, TINY
from benchmarks.timing import min_median_max, result
from hybridrl.config.choices import RolloutWeights
from hybridrl.config.planner.multicast import turn_off_multicast
from hybridrl.data.requests import Request, Requests
from hybridrl.data.requests import SamplingParams as RequestParams
from hybridrl.data.seeds import sample_seed
from hybridrl.distributed.mesh import build_mesh
from hybridrl.models.resolve import resolve_model
from hybridrl.rollout.engine import EnginePart
from hybridrl.rollout.vllm.engine import VLLMEngine
from hybridrl.rollout.vllm.fp8 import PER_CHANNEL
from hybridrl.workers.rollout import RolloutWorker

SHAPES = {f"qwen2.5-{size}": shape for size, shape in QWEN2_5.items()} | {"small": TINY}
# Rounds that do not count: allocations and branches settle over the first ones.
SETTLING_ROUNDS = 3


class EndlessWorker(RolloutWorker):
    """A rollout worker whose responses end by length alone, on weights that vLLM has made up."""

    def build_engine(self) -> VLLMEngine:
        """The engine, without tokens that end a response."""
        return VLLMEngine(self.config, Path(self.config.model.path), [], self.mesh.device_type)

    def take_random_weights(self) -> None:
        """Let generation begin without a reshard."""
        self.others = []
        self.engine.wake(EnginePart.WEIGHTS)
        self.weight_version = 0


def main() -> None:
    """Measure and print one JSON line."""
    args = _arguments()
    if args.alone:
        args.alone.write_text(json.dumps(_measure_alone(args)))
        return
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        os.environ["VLLM_RPC_BASE_PATH"] = folder  # its sockets would stay among temporary files
        _join_group(device_type, Path(folder))
        if args.tp != dist.get_world_size():
            raise SystemExit(f"--tp {args.tp} needs torchrun --nproc-per-node {args.tp}")
        alone = [_seconds_alone(Path(folder)) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(alone, src=0)
        worker = _worker(args, device_type, _model(args, Path(folder)))
        ways = _ways(args, worker)
        llm = worker.engine._llm  # type: ignore[attr-defined]
        seconds = _alternate(ways, llm, args.repeats) | {"alone": alone[0]}
        line = _result(args, ways, seconds, _floor_ms(args, worker))
        if dist.get_rank() == 0:
            print(json.dumps(line), flush=True)
        dist.barrier()
    os._exit(0)  # vLLM and the process group end in either order only with warnings


def _seconds_alone(folder: Path) -> list[float]:
    """Run this script with --alone; return the seconds of each round."""
    torchruns = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_", "MASTER_", "ROLE_", "TORCHELASTIC_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(torchruns)}
    env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # A forked engine could not use CUDA, which this process has asked for its devices.
    env.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    command = [sys.executable, __file__, *sys.argv[1:], "--alone", str(folder / "alone.json")]
    subprocess.run(command, env=env, stdout=sys.stderr, check=True)
    found: list[float] = json.loads((folder / "alone.json").read_text())
    return found


def _measure_alone(args: argparse.Namespace) -> list[float]:
    from vllm import LLM

    turn_off_multicast()
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            str(_model(args, Path(folder))),
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16" if torch.cuda.is_available() else "float32",
            tensor_parallel_size=args.tp,
            gpu_memory_utilization=0.5 if torch.cuda.is_available() else 0.1,
            max_model_len=args.prompt_tokens + args.response_tokens,
            max_num_seqs=args.prompts * args.responses,
            enforce_eager=args.eager,
            quantization=PER_CHANNEL if args.weights == "fp8" else None,
        )
        return _alternate({"alone": lambda: _plain(args, llm)}, llm, args.repeats)["alone"]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", help="as model.path; only its shape is used")
    model.add_argument("--shape", choices=SHAPES, default="qwen2.5-1.5b")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--responses", type=int, default=4, help="per prompt")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--response-tokens", type=int, default=256)
    parser.add_argument("--tp", type=int, default=1)
    weights = [weights.value for weights in RolloutWeights]
    parser.add_argument("--weights", choices=weights, default="dtype")
    parser.add_argument("--steps", type=int, default=4, help="rollout.num_scheduler_steps")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--small", action="store_true", help="a tiny model, for a CPU")
    parser.add_argument("--alone", type=Path, help="write the seconds of vLLM alone to a file")
    args = parser.parse_args()
    if args.small:
        args.shape, args.eager, args.repeats = "small", True, 3
        args.prompts, args.prompt_tokens, args.response_tokens = 8, 24, 32
    return args


def _join_group(device_type: str, folder: Path) -> None:
    """The process group of torchrun, or one of this process alone."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    by_torchrun = "RANK" in os.environ
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    if device_type == "cuda":
        turn_off_multicast()  # it can take a shared host's GPUs out of service
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // 2))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo",
        init_method="env://" if by_torchrun else f"file://{folder}/rendezvous",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(minutes=10),
    )


def _model(args: argparse.Namespace, folder: Path) -> Path:
    """A folder with the model's config.json."""
    if args.model is not None:
        return resolve_model(args.model)
    (folder / "model").mkdir()
    config = SHAPES[args.shape] | {"eos_token_id": None}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    return folder / "model"


def _worker(args: argparse.Namespace, device_type: str, folder: Path) -> EndlessWorker:
    config = composed(
        {
            "hardware": "gpu" if device_type == "cuda" else "cpu",
            "cluster.gpus_per_node": args.tp,
            "model.path": folder,
            "model.init": "random",
            "rollout.tensor_parallel_size": args.tp,
            "rollout.responses_per_prompt": args.responses,
            "rollout.max_prompt_tokens": args.prompt_tokens,
            "rollout.max_response_tokens": args.response_tokens,
            "rollout.max_num_seqs": args.prompts * args.responses,
            "rollout.enforce_eager": args.eager,
            "rollout.weights": args.weights,
            "rollout.num_scheduler_steps": args.steps,
            "rollout.sleep": "none",
        }
    )
    worker = EndlessWorker(config.rollout, build_mesh(config.fsdp, device_type))
    worker.take_random_weights()
    return worker


def _ways(args: argparse.Namespace, worker: EndlessWorker) -> dict[str, Callable[[], Any]]:
    """The ways to the same number of tokens."""
    from vllm import SamplingParams, TokensPrompt

    rows, llm = _prompts(args).tolist(), worker.engine._llm  # type: ignore[attr-defined]
    params, seed = RequestParams(1.0), worker.config.seed
    requests = [
        Request(f"{p}-{k}", row, sample_seed(seed, 1, p, k), args.response_tokens, params)
        for p, row in enumerate(rows)
        for k in range(args.responses)
    ]
    ids = torch.arange(args.prompts).repeat_interleave(args.responses)
    batch = Requests(requests, ids, args.responses)

    def equal() -> Any:
        prompts = [TokensPrompt(prompt_token_ids=r) for r in rows for _ in range(args.responses)]
        params = [
            SamplingParams(seed=one.seed, logprobs=0, flat_logprobs=True, **_common(args))
            for one in requests
        ]
        return llm.generate(prompts, params, use_tqdm=False)

    def as_it_is(way: Callable[[], Any]) -> Any:
        # Without what the engine puts in place of vLLM's methods.
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        names = "schedule", "update_from_output", "allocate_slots", "cache_blocks"
        own = [vars(scheduler), vars(scheduler.kv_cache_manager)]
        kept = [{name: members.pop(name) for name in names if name in members} for members in own]
        try:
            return way()
        finally:
            for members, taken in zip(own, kept, strict=True):
                members.update(taken)

    def single() -> Any:
        with patch.object(worker.engine, "_most_steps", 1):
            return worker.generate(batch)

    return {
        "worker": lambda: worker.generate(batch),
        "single": single,
        "plain": lambda: as_it_is(lambda: _plain(args, llm)),
        "equal": lambda: as_it_is(equal),
    }


def _prompts(args: argparse.Namespace) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, 400, (args.prompts, args.prompt_tokens), generator=generator)


def _common(args: argparse.Namespace) -> dict[str, Any]:
    return {"max_tokens": args.response_tokens, "ignore_eos": True, "detokenize": False}


def _plain(args: argparse.Namespace, llm: Any) -> Any:
    """Sample by vLLM as it comes."""
    from vllm import SamplingParams, TokensPrompt

    prompts = [TokensPrompt(prompt_token_ids=row) for row in _prompts(args).tolist()]
    params = SamplingParams(n=args.responses, **_common(args))
    return llm.generate(prompts, params, use_tqdm=False)


def _alternate(
    ways: dict[str, Callable[[], Any]], llm: Any, repeats: int
) -> dict[str, list[float]]:
    """Seconds of each way, one after the other in every round, without the first rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(SETTLING_ROUNDS + repeats):
        for name, way in ways.items():
            llm.reset_prefix_cache()
            if dist.is_initialized():
                dist.barrier()
            start = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - start)
    return {name: taken[SETTLING_ROUNDS:] for name, taken in seconds.items()}


def _floor_ms(args: argparse.Namespace, worker: EndlessWorker) -> float:
    """Milliseconds in which a decoding step's bytes cross the memory of this rank's device."""
    tensors = worker.engine.tensors()
    weights = sum(tensor.nbytes for tensor in tensors.values())
    if any("lm_head" in name for name in tensors):  # else its rows are the output's, too
        weights -= sum(tensor.nbytes for name, tensor in tensors.items() if "embed" in name)
    config = worker.engine._llm.llm_engine.vllm_config  # type: ignore[attr-defined]
    model, parallel = config.model_config, config.parallel_config
    per_token = 2 * model.get_num_layers(parallel) * model.get_num_kv_heads(parallel)
    per_token *= model.get_head_size() * model.dtype.itemsize
    context = args.prompt_tokens + args.response_tokens / 2
    total = weights + args.prompts * args.responses * context * per_token
    return 1000 * total / _copy_bandwidth(worker.mesh.device_type)


def _copy_bandwidth(device_type: str) -> float:
    """Bytes per second of a copy, read and written ones."""
    source = torch.ones(2**28 if device_type == "cuda" else 2**24, device=device_type)
    target, taken = torch.empty_like(source), []
    for _ in range(12):
        if device_type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source)
        if device_type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return 2 * source.nbytes / statistics.median(taken[2:])


def _result(
    args: argparse.Namespace,
    ways: dict[str, Callable[[], Any]],
    seconds: dict[str, list[float]],
    floor: float,
) -> dict[str, Any]:
    tokens = args.prompts * args.responses * args.response_tokens
    batch = ways["worker"]()
    assert len(batch.responses.values) == tokens, "a response ended early"
    same = [output.outputs[0].token_ids for output in ways["equal"]()]
    single = ways["single"]().responses
    step_ms = 1000 * (statistics.median(seconds["worker"]) - batch.engines[0].first_token_s)
    step_ms /= args.response_tokens - 1
    pairs = zip(batch.responses.rows(), same, strict=True)
    medians = {name: tokens / statistics.median(taken) for name, taken in seconds.items()}
    sizes = ("weights", "steps", "tp", "prompts", "responses", "prompt_tokens", "response_tokens")
    settings = {"model": args.model or args.shape} | {name: vars(args)[name] for name in sizes}
    measured = {
        "tokens_per_second": {name: round(value) for name, value in medians.items()},
        "seconds_min_median_max": {n: min_median_max(taken) for n, taken in seconds.items()},
        "worker_to_plain": round(medians["worker"] / medians["plain"], 3),
        "worker_to_equal": round(medians["worker"] / medians["equal"], 3),
        "worker_to_alone": round(medians["worker"] / medians["alone"], 3),
        "worker_to_single": round(medians["worker"] / medians["single"], 3),
        "same_in_single_steps": torch.equal(batch.responses.values, single.values),
        "step_ms": round(step_ms, 3),
        "floor_ms": round(floor, 3),
        "step_to_floor": round(step_ms / floor, 2),
        "first_token_s": round(batch.engines[0].first_token_s, 4),
        "same_responses": sum(row.tolist() == list(other) for row, other in pairs),
    }
    return result("rollout", settings, measured)


if __name__ == "__main__":
    main()
