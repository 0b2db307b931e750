"""How long is a whole step of GRPO or PPO, and where does its time go?

Question   What does a step cost, from prompts to updated weights, start of the program included?
Workload   The real command, in a process of its own, on GSM8K problems. Qwen2's 1.5B shape (or
           --shape) with random weights that never end a response, float32 masters, bfloat16
           compute, lr 1e-6, one optimizer step a step, weights verified at every sync. GRPO
           without a reference; --recipe gsm8k_ppo trains a critic too, and penalises the KL
           against a reference.
             one_gpu      1 GPU, 64 prompts x 4 responses, 256 + 256 tokens, vocabulary 49,152
             field        2 GPUs, tp 2, 128 prompts, else the same
             whole_step   4 GPUs, tp 2, 256 prompts x 4 responses, 256 + 512 tokens, vocabulary
                          151,936 (7b: 152,064)
             experts      2 GPUs, tp 2, for --shape olmoe: field, with what the plan offloads
Measures   Medians over the steps after the first, without the last, which evaluates: seconds of
           the step, of sampling, forwards and updates; milliseconds of the weight sync (prepare,
           move, verify, their sum; apart from it the wait for the slowest rank; the whole switch;
           from there until all engines have a first token; and from the last update to that);
           share of the GPUs' time that is idle, share of the step outside sampling, forwards and
           updates (docs/metrics.md). Once: seconds from the program's start to the first step;
           what torch and vLLM compile is kept from one run to the next, so the second is a warm
           one.
Run        python benchmarks/grpo_step.py --data gsm8k/train.jsonl                 (2 H200s)
           python benchmarks/grpo_step.py --data gsm8k/train.jsonl --preset whole_step   (4 H200s)
           python benchmarks/grpo_step.py --data gsm8k/train.jsonl --recipe gsm8k_ppo    (2 H200s)
           python benchmarks/grpo_step.py --data gsm8k/train.jsonl --preset experts --shape olmoe
           python benchmarks/grpo_step.py --small                                  (CPU, a minute)
           What follows is passed on: python benchmarks/grpo_step.py --small rollout.sleep=none

Prints one JSON line; append it to benchmarks/results/grpo_step.jsonl.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.runs import metrics_of_run
from benchmarks.shapes import SHAPES, VOCABULARY, make_model
from benchmarks.timing import result
from hybridrl.config.planner.cache import cache_folder

RECIPE, SHAPE = "gsm8k_grpo", "1.5b"

# Parts of moving the weights; around them memory is mapped and given back.
SYNC = ("prepare", "move", "verify")

RECIPES = {"gsm8k_grpo": ["algorithm.kl.coef=0"], "gsm8k_ppo": []}
COMMON = [
    "actor.optim.lr=1e-6",
    "rollout.responses_per_prompt=4",
    "eval.every_steps=0",
    "eval.greedy=false",
    "trainer.samples_every_steps=0",
    "trainer.save_final_model=false",
    "checkpoint.every_steps=0",
    "tracking.tensorboard=false",
]
ON_GPU = [
    "hardware=gpu",
    "cluster.nvlink_multicast=off",
    "model.init=random",
    "rollout.max_prompt_tokens=256",
    "data.too_long_prompts=drop",
    "data.num_eval_problems=8",
]
TWO_GPUS = [
    *ON_GPU,
    "cluster.gpus_per_node=2",
    "rollout.tensor_parallel_size=2",
    "data.prompts_per_step=128",
    "actor.mini_batch_size=512",
    "rollout.max_response_tokens=256",
]
PRESETS = {
    "one_gpu": [
        *ON_GPU,
        "cluster.gpus_per_node=1",
        "data.prompts_per_step=64",
        "actor.mini_batch_size=256",
        "rollout.max_response_tokens=256",
    ],
    "field": TWO_GPUS,
    "whole_step": [
        *ON_GPU,
        "cluster.gpus_per_node=4",
        "rollout.tensor_parallel_size=2",
        "data.prompts_per_step=256",
        "actor.mini_batch_size=1024",
        "rollout.max_response_tokens=512",
    ],
    "experts": TWO_GPUS,
    "small": [
        "hardware=cpu",
        "cluster.gpus_per_node=1",
        "data.prompts_per_step=8",
        "data.num_eval_problems=8",
        "actor.mini_batch_size=32",
    ],
}
# Of SmolLM2's tokenizer; else the shape's own.
VOCABULARIES = {"one_gpu": VOCABULARY, "field": VOCABULARY}


def run(
    args: argparse.Namespace, preset: str, extra: list[str], run_dir: Path
) -> list[dict[str, Any]]:
    """Train for `args.steps` timed steps and two more; return the rows of the metrics.

    Raises:
        SystemExit: the run failed.
    """
    overrides = [f"+recipe={args.recipe}", *RECIPES[args.recipe], *COMMON, *PRESETS[preset]]
    overrides.append(f"trainer.total_steps={args.steps + 2}")
    if preset != "small":
        if args.data is None:
            raise SystemExit("--data is needed: the training problems of GSM8K as JSON lines")
        # vLLM finds what it compiled for a model by the model's path.
        name = preset if args.shape == SHAPE else f"{preset}_{args.shape}"
        model = cache_folder() / "benchmarks" / name
        shape = SHAPES[args.shape]
        make_model(model, shape | {"vocab_size": VOCABULARIES.get(preset, shape["vocab_size"])})
        overrides += [f"model.path={model}", f"data.train_files={args.data.resolve()}"]
    return metrics_of_run([*overrides, *extra], run_dir)


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The benchmark's numbers from a run's metrics; its first and last step are left out."""
    timed = rows[2:-1]

    def median(name: str, digits: int = 3, scale: float = 1.0) -> float | None:
        values = [row[name] for row in timed if row.get(name) is not None]
        return round(scale * statistics.median(values), digits) if values else None

    others = ("ref_log_probs_s", "values_s", "update_critic_s")
    step = [row["time/step_s"] for row in timed]
    outside = [row["time/outside_s"] / row["time/step_s"] for row in timed]
    return {
        "steps_timed": len(timed),
        "step_s": median("time/step_s"),
        "step_s_min_max": [round(min(step), 3), round(max(step), 3)],
        "rollout_s": median("time/rollout_s"),
        "old_log_probs_s": median("time/old_log_probs_s"),
        "update_s": median("time/update_actor_s"),
        **{name: s for name in others if (s := median(f"time/{name}")) is not None},
        "sync_ms": sync_ms(timed)
        | {
            "whole_switch": median("reshard/total_s", 2, 1e3),
            "until_first_tokens": median("rollout/first_token_s", 2, 1e3),
            "from_last_update": median("rollout/switch_s", 2, 1e3),
        },
        "switch_parts_ms": _parts(timed, "reshard/", scale=1e3),
        "idle_fraction": median("idle/fraction", 4),
        "outside_fraction": round(statistics.median(outside), 4),
        "idle_s": _parts(timed, "idle/"),
        "time_s": _parts(timed, "time/"),
        "mfu": {"old_log_probs": median("mfu/old_log_probs"), "update": median("mfu/update_actor")},
        "rollout_tokens_per_second": median("rollout/tokens_per_second", 0),
        "response_tokens_mean": median("response/length_mean", 1),
        "setup_s": round(rows[0]["setup/total_s"] + rows[0]["time/reshard_s"], 1),
        "setup_parts_s": {
            name.removeprefix("setup/").removesuffix("_s"): round(value, 1)
            for name, value in rows[0].items()
            if name.startswith("setup/") and value is not None
        }
        | {"first_reshard": round(rows[0]["time/reshard_s"], 1)},
    }


def sync_ms(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Medians of the sync's parts and of their sum in each step, of each part's slowest rank.

    A rank that is ready before others waits for them. That is `wait`, which the sum leaves out.
    """
    names = (*SYNC, "wait")
    parts = {name: [row.get(f"reshard/{name}_s") or 0.0 for row in rows] for name in names}
    parts["sum"] = [sum(one) for one in zip(*(parts[name] for name in SYNC), strict=True)]
    return {name: round(1e3 * statistics.median(times), 2) for name, times in parts.items()}


def _parts(rows: list[dict[str, Any]], prefix: str, scale: float = 1.0) -> dict[str, float]:
    """Medians of the times whose names begin with `prefix`, by what follows it; 0 left out."""
    names = [name for name in rows[0] if name.startswith(prefix) and name.endswith("_s")]
    medians = {
        name.removeprefix(prefix).removesuffix("_s"): statistics.median(
            [row.get(name) or 0.0 for row in rows]
        )
        for name in names
    }
    found = {name: round(scale * seconds, 3) for name, seconds in medians.items()}
    return {name: time for name, time in found.items() if time}


def main() -> None:
    """Run, read metrics.jsonl, print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="GSM8K's training problems, JSON lines")
    on_gpus = [name for name in PRESETS if name != "small"]
    parser.add_argument("--preset", choices=on_gpus, default="field")
    parser.add_argument("--recipe", choices=RECIPES, default=RECIPE)
    parser.add_argument("--shape", choices=SHAPES, default=SHAPE, help="of the model on GPUs")
    parser.add_argument("--small", action="store_true", help="the tiny model on a CPU")
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--keep", type=Path, help="leave the run in this new folder")
    args, extra = parser.parse_known_args()
    preset = "small" if args.small else args.preset
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep.resolve() if args.keep else Path(temporary)
        run_dir = folder / "run"
        found = summarize(run(args, preset, extra, run_dir))
        manifest = json.loads((run_dir / "manifest.json").read_text())
    gpus = [gpu["name"] for node in manifest["hardware"]["nodes"] for gpu in node["gpus"]]
    settings = {
        "preset": preset,
        "recipe": args.recipe,
        "shape": "embedded" if args.small else args.shape,
        "ranks": manifest["config"]["cluster"]["gpus_per_node"],
        "overrides": extra,
        "steps_timed": found.pop("steps_timed"),
    }
    line = result("grpo_step", settings, found) | {"device": gpus[0] if gpus else "CPU"}
    print(json.dumps(line))


if __name__ == "__main__":
    main()
