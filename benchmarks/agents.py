"""What do agents cost, beside a batch of as many tokens?

Question   How many tokens a second do agents sample through the endpoint, whose turns come one
           after the other over HTTP, beside responses of the same length in one batch?
Workload   The real command, twice on the same machine: at the same time, if it has two GPUs, since
           what others do there slows both. Qwen2.5-1.5B's shape with random weights that never end
           a response; 64 prompts x 4, GRPO without a reference.
             batch   256 responses of 1,024 tokens
             agents  256 programs with the OpenAI SDK, all at the same time: 4 turns of 256 tokens,
                     with a message of the user before each
Measures   Sampled tokens/s: the engines' tokens over the seconds of the step's sampling, programs
           included; medians. Aim: agents at least 0.9 of batch.
Run        python benchmarks/agents.py --data gsm8k/train.jsonl        (one GPU or two)
           python benchmarks/agents.py --small                         (CPU, a minute)
           What follows is passed on to both runs.

Prints one JSON line; append it to benchmarks/results/agents.jsonl.
"""

import argparse
import json
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.grpo_step import COMMON, ON_GPU
from benchmarks.runs import metrics_of_run
from benchmarks.shapes import SHAPES, VOCABULARY, make_model
from benchmarks.timing import result
from hybridrl.config.planner.cache import cache_folder
from hybridrl.environments.programs import Task

SHAPE = "1.5b"
TURNS = 4
TOKENS, SMALL_TOKENS = 256, 12


async def run_turns(task: Task, client: Any, *, tokens: int) -> float:
    """Ask for `TURNS` answers of `tokens` tokens; an agent program."""
    messages = list(task.messages)
    for turn in range(TURNS):
        answer = await client.chat.completions.create(
            model="policy", messages=messages, max_tokens=tokens
        )
        messages += [answer.choices[0].message, {"role": "user", "content": f"Turn {turn}: go on."}]
    return 0.0


def run(
    args: argparse.Namespace, extra: list[str], folder: Path, gpu: int | None
) -> list[dict[str, Any]]:
    """Train for a few steps, on GPU number `gpu` if given; return the rows of the metrics.

    Raises:
        SystemExit: the run failed.
    """
    overrides = ["+recipe=gsm8k_grpo", *COMMON]
    overrides += ["algorithm.kl.coef=0", "tracking.report=false"]
    overrides += [f"trainer.total_steps={args.steps + 3}"]
    if args.small:
        overrides += ["hardware=cpu", "cluster.gpus_per_node=1", "data.prompts_per_step=16"]
        overrides += ["actor.mini_batch_size=64", "data.num_eval_problems=8"]
    else:
        model = cache_folder() / "benchmarks" / "agents"
        make_model(model, SHAPES[SHAPE] | {"vocab_size": VOCABULARY})
        overrides += [*ON_GPU, "cluster.gpus_per_node=1", f"model.path={model}"]
        overrides += [f"data.train_files={args.data.resolve()}", "data.prompts_per_step=64"]
        overrides += ["rollout.max_response_tokens=1280", "actor.mini_batch_size=256"]
    return metrics_of_run([*overrides, *extra], folder, gpu)


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a run's numbers, over the steps after the first two; the last one evaluates."""
    timed = rows[3:-1]

    def median(name: str) -> float:
        return round(statistics.median(row[name] for row in timed), 3)

    found: dict[str, Any] = {"tokens_per_s": median("rollout/tokens_per_second")}
    found["tokens_per_s_by_step"] = [round(row["rollout/tokens_per_second"]) for row in timed]
    found |= {"rollout_s": median("time/rollout_s"), "step_s": median("time/step_s")}
    if "rollout/turns_mean" in timed[0]:
        found |= {"turns": median("rollout/turns_mean"), "branches": median("agent/branches")}
    return found | {"setup_s": round(rows[0]["setup/total_s"], 1)}


def main() -> None:
    """Run both and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="GSM8K's training problems, JSON lines")
    parser.add_argument("--steps", type=int, default=4, help="timed steps")
    parser.add_argument("--small", action="store_true", help="the embedded model on a CPU")
    args, extra = parser.parse_known_args()
    if args.data is None and not args.small:
        raise SystemExit("--data is needed: the training problems of GSM8K as JSON lines")
    tokens = SMALL_TOKENS if args.small else TOKENS
    agents = ["environment=agent", f"agent.function={Path(__file__).resolve()}:run_turns"]
    agents += [f"+agent.args.tokens={tokens}", "agent.concurrency=256"]
    ways = {"batch": [f"rollout.max_response_tokens={TURNS * tokens}"], "agents": agents}
    gpus = [0, 1] if torch.cuda.device_count() > 1 else [None]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(gpus)) as pool:
        runs = {
            name: pool.submit(run, args, [*way, *extra], Path(folder) / name, gpu)
            for (name, way), gpu in zip(ways.items(), cycle(gpus), strict=False)
        }
        measured: dict[str, Any] = {name: summarize(one.result()) for name, one in runs.items()}
    speeds = [measured[name]["tokens_per_s"] for name in ("agents", "batch")]
    measured["agents_to_batch"] = round(speeds[0] / speeds[1], 3)
    shape = "embedded" if args.small else SHAPE
    settings = {"shape": shape, "ranks": 1, "together": len(gpus) > 1, "overrides": extra}
    print(json.dumps(result("agents", settings, measured)))


if __name__ == "__main__":
    main()
