"""How many tokens does a run train a second if few responses are many times as long as the mean?

Question   What do rollout.schedule=partial and split save where a step waits for its longest
           response, and how near do they come to the same tokens in responses of equal length?
Workload   The real command, once for each schedule, one after the other on the same machine. Random
           weights of Qwen2.5-1.5B's shape (or --shape), bfloat16 compute, 128 prompts x 4
           responses, GRPO without a reference, one optimizer step a step, every weight sync
           verified. The engine ends a response at its drawn length: log-normal, sigma 1, mean about
           600 before a cap of 4,096 tokens, a function of (seed, step, prompt, sample), so that
           sync and partial draw the same ones. `equal` is sync with all lengths equal to the mean.
             sync, partial, equal   all GPUs train and sample
             partial_kv             partial with rollout.keep_kv
             split                  with several GPUs: --rollout-gpus of them sample, the others
                                    train
           partial and split may train a token 8 updates later (max_versions), as the longest
           responses need, with three times a step's prompts in flight.
Measures   Over the steps after the first --settling ones: trained response tokens a second (all of
           them by all seconds), median seconds of a step, longest response over the mean, idle
           share; of partial and split the age of trained tokens in updates and calls of the
           engines; of split the seconds that trainers and engines idle, milliseconds of the swap
           and of the transfer.
Run        python benchmarks/long_tail.py                                     (1 GPU)
           python benchmarks/long_tail.py --gpus 2                            (2 GPUs)
           python benchmarks/long_tail.py --gpus 2 --shape 7b fsdp.offload=idle_all
           python benchmarks/long_tail.py --small                             (CPU, 3 minutes)
           Further arguments are overrides of every run.

Prints one JSON line for each schedule; append them to benchmarks/results/long_tail.jsonl.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import grpo_step
from benchmarks.runs import metrics_of_run
from benchmarks.shapes import QWEN2_5, VOCABULARY, make_model
from benchmarks.timing import min_median_max, result
from hybridrl.config.planner.cache import cache_folder
from hybridrl.config.schema import RolloutConfig
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.requests import Requests
from hybridrl.models.resolve import model_folder
from hybridrl.rollout.vllm.engine import VLLMEngine
from hybridrl.workers.rollout import RolloutWorker

SIGMA = 1.0
# The longest responses need several steps.
LAGGING = ["rollout.max_versions=8"]
SCHEDULES = {
    "sync": ["rollout.schedule=sync"],
    "partial": ["rollout.schedule=partial", *LAGGING],
    "partial_kv": ["rollout.schedule=partial", *LAGGING, "rollout.keep_kv=true"],
    "equal": ["rollout.schedule=sync"],
    "split": ["rollout.schedule=split", *LAGGING],
}
COMMON = [
    *grpo_step.COMMON,
    "+recipe=gsm8k_grpo",
    f"rollout.worker={Path(__file__).resolve()}:DrawnLengths",
    "data=embedded",
    "algorithm.kl.coef=0",
    "trainer.max_log_prob_diff=10",
    "eval.samples=1",
    "tracking.report=false",
]
ON_GPU = [
    *grpo_step.ON_GPU,
    "rollout.max_response_tokens=4096",
    "data.prompts_per_step=128",
    "actor.mini_batch_size=512",
]
SMALL = [
    "hardware=cpu",
    "rollout.max_response_tokens=160",
    "data.prompts_per_step=16",
    "actor.mini_batch_size=64",
    "data.num_eval_problems=8",
]
MEAN_TOKENS, SMALL_MEAN_TOKENS = 600, 24


@dataclass(kw_only=True)
class DrawnConfig(RolloutConfig):
    """Config of a rollout whose responses have drawn lengths; all equal with sigma 0."""

    mean_tokens: float
    sigma: float


def drawn_length(seed: int, mean: float, sigma: float, longest: int) -> int:
    """Return a response's length, log-normal with this mean, cut at the longest."""
    noise = float(torch.randn((), generator=torch.Generator().manual_seed(seed)))
    return max(1, min(longest, round(mean * math.exp(sigma * noise - sigma**2 / 2))))


class DrawnLengths(RolloutWorker):
    """Rollout worker whose responses end at drawn lengths alone.

    A response that goes on in a later call is known by its tokens.
    """

    config_class = DrawnConfig
    config: DrawnConfig

    def build_engine(self) -> VLLMEngine:
        """Build the engine, without tokens that end a response."""
        self.left: dict[tuple[str | int, ...], int] = {}
        folder = model_folder(self.config.model)
        return VLLMEngine(self.config, folder, [], self.mesh.device_type)

    def generate(self, requests: Requests) -> RolloutBatch:
        """Sample each response up to what is left of its length."""
        rows = [
            one._replace(
                max_tokens=self.left.pop((one.request_id, *one.prompt), None)
                or self._draw(one.seed)
            )
            for one in requests.requests
        ]
        batch = super().generate(replace(requests, requests=rows))
        if batch.unfinished is not None:
            # One without tokens is drawn again, by the same seed.
            parts = zip(rows, batch.responses.rows(), batch.unfinished.tolist(), strict=True)
            self.left |= {
                (one.request_id, *one.prompt, *tokens.tolist()): one.max_tokens - len(tokens)
                for one, tokens, is_open in parts
                if is_open and len(tokens)
            }
        longest = self.config.max_response_tokens
        return replace(batch, truncated=batch.responses.lengths >= longest)

    def _draw(self, seed: int) -> int:
        config = self.config
        return drawn_length(seed, config.mean_tokens, config.sigma, config.max_response_tokens)


def run(args: argparse.Namespace, schedule: str, extra: list[str], folder: Path) -> list[Any]:
    """Train with a schedule; return the rows of its metrics, and print its output to stderr.

    Raises:
        SystemExit: the run failed.
    """
    mean = SMALL_MEAN_TOKENS if args.small else MEAN_TOKENS
    cap, sigma = (160 if args.small else 4096), SIGMA
    if schedule == "equal":  # the mean of what the others draw
        lengths = [drawn_length(seed, mean, SIGMA, cap) for seed in range(20_000)]
        mean, sigma = statistics.fmean(lengths), 0.0
    in_flight = 3 * (16 if args.small else 128)
    overrides = [
        *COMMON,
        *(SMALL if args.small else ON_GPU),
        *SCHEDULES[schedule],
        f"+rollout.mean_tokens={mean}",
        f"+rollout.sigma={sigma}",
        f"cluster.gpus_per_node={args.gpus}",
        f"trainer.total_steps={args.settling + args.steps}",
        *([] if schedule in ("sync", "equal") else [f"rollout.max_in_flight={in_flight}"]),
        *([f"placement.rollout_gpus={args.rollout_gpus}"] if schedule == "split" else []),
    ]
    if not args.small:
        model = cache_folder() / "benchmarks" / f"long_tail_{args.shape}"
        make_model(model, QWEN2_5[args.shape] | {"vocab_size": VOCABULARY})
        overrides.append(f"model.path={model}")
    return metrics_of_run([*overrides, *extra], folder / schedule)


def summarize(rows: list[dict[str, Any]], settling: int) -> dict[str, Any]:
    """Return the numbers of one schedule; step 0 and the first steps are left out."""
    timed = rows[1 + settling :]
    seconds = [row["time/step_s"] - row.get("time/evaluate_s", 0.0) for row in timed]
    tokens = sum(row["response/length_mean"] * row["batch/responses"] for row in timed)

    def median(name: str, scale: float = 1.0) -> float | None:
        found = [row[name] for row in timed if row.get(name) is not None]
        return round(scale * statistics.median(found), 3) if found else None

    found = {
        "steps_timed": len(timed),
        "trained_tokens_per_s": round(tokens / sum(seconds), 1),
        "step_s": min_median_max(seconds),
        "length_mean": round(tokens / sum(row["batch/responses"] for row in timed), 1),
        "length_max": max(row["response/length_max"] for row in timed),
        "idle_fraction": median("idle/fraction"),
        "version_lag_mean": median("partial/version_lag_mean"),
        "rounds": median("partial/rounds"),
        "idle_trainers_s": median("idle/trainers_s"),
        "idle_engines_s": median("idle/engines_s"),
        "swap_ms": median("split/swap_s", 1e3),
        "move_ms": median("reshard/move_s", 1e3),
        "verify_ms": median("reshard/verify_s", 1e3),
        "received_gib": median("reshard/received_bytes", 2**-30),
    }
    return {name: value for name, value in found.items() if value is not None}


def main() -> None:
    """Run the schedules and print a JSON line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--rollout-gpus", type=int, default=1, help="those that split samples with")
    parser.add_argument("--shape", choices=QWEN2_5, default="1.5b")
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES)
    parser.add_argument("--steps", type=int, default=8, help="timed steps")
    parser.add_argument("--settling", type=int, default=4, help="steps before them")
    parser.add_argument("--small", action="store_true", help="the tiny model on two CPU cores")
    args, extra = parser.parse_known_args()
    if args.small:
        args.gpus, args.shape = 2, "embedded"
    possible = [name for name in SCHEDULES if args.gpus > 1 or name != "split"]
    for schedule in args.schedules or possible:
        with tempfile.TemporaryDirectory() as folder:
            rows = run(args, schedule, extra, Path(folder))
        settings = {
            "schedule": schedule,
            "shape": args.shape,
            "ranks": args.gpus,
            "rollout_gpus": args.rollout_gpus if schedule == "split" else 0,
            "overrides": [*SCHEDULES[schedule][1:], *extra],
        }
        print(json.dumps(result("long_tail", settings, summarize(rows, args.settling))), flush=True)


if __name__ == "__main__":
    main()
