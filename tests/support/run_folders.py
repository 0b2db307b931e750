"""Folders as runs leave them, made without a run.

`write_run` makes one of so many steps; its values follow simple rules that tests can compute.
`make_run` makes one of two steps, with what lists of runs read.
"""

import json
import math
import socket
from pathlib import Path
from random import Random
from typing import Any

import pyarrow
from pyarrow import parquet

QUESTIONS = [
    f"Mia has {n} pens and buys {n + 3} more. How many pens are there?" for n in range(400)
]
PER_PROMPT = 8
HERE = f"process 1 on {socket.gethostname()}\n"
METRICS = (
    {"step": 0, "eval/accuracy": 0.25, "eval/ci95": 0.125, "reward/mean": None},
    {"step": 1, "eval/accuracy": 0.5, "eval/ci95": 0.125, "reward/mean": 0.5, "actor/kl": 0.001},
    {"step": 2, "eval/accuracy": None, "eval/ci95": None, "reward/mean": 0.75, "actor/kl": 0.002},
)


def metrics_row(step: int, rng: Random, others: int) -> dict[str, Any]:
    evaluated = step % 10 == 0
    row: dict[str, Any] = {"step": step, "reward/mean": min(1, step / 800) + rng.gauss(0, 0.03)}
    row |= {"reward/part_format": 0.5, "reward/std": 0.4, "actor/kl": step * 1e-5}
    row |= {"actor/entropy": 0.3 * math.exp(-step / 500), "actor/clip_fraction": rng.random() / 20}
    row |= {"actor/ratio_mean": 1.0, "actor/ratio_max": 1 + rng.random(), "actor/lr": 1e-5}
    row |= {"critic/lr": 3e-5, "actor/grad_norm": rng.random()}
    row |= {"response/length_mean": 90 + rng.random(), "response/truncated_fraction": 0.05}
    row |= {"rollout/log_prob_diff_mean": rng.random() / 1e4}
    row |= {"rollout/tokens_per_second": 5000 + 100 * rng.random(), "time/step_s": 12.5}
    row |= {f"other/metric_{index}": rng.random() for index in range(others)}
    for name in ("", "_greedy"):
        row[f"eval/accuracy{name}"] = min(1, 0.2 + step / 1500) if evaluated else None
        row[f"eval/ci95{name}"] = 0.04 if evaluated else None
    return row


def response(step: int, index: int, prompt: int, rng: Random, words: int) -> dict[str, Any]:
    answer = 2 * prompt + 3
    text = " ".join(str(rng.randrange(10_000)) for _ in range(words))
    return {
        "prompt_id": prompt,
        "prompt": f"<|user|>{QUESTIONS[prompt]}<|assistant|>",
        "question": QUESTIONS[prompt],
        "response": f"{prompt} + {prompt + 3} = {text}\n#### {answer}",
        "answer": f"#### {answer}",
        "score": float(index % 2),
        "length": words + 10,
        "failure": "timeout: 5 s" if index == 5 else None,
        "truncated": index % 8 == 7,
        "parts": {"format": 0.5},
        "turns": None,
        "weight_version": step - 1,
    }


def token_rows(step: int, index: int, length: int, rng: Random) -> list[dict[str, Any]]:
    return [
        {
            "response": index,
            "position": position,
            "token_id": rng.randrange(32000),
            "token": f" {rng.randrange(1000)}" if position % 12 else "\n",
            "rollout_log_prob": (old := -rng.expovariate(1)),
            "old_log_prob": old + rng.gauss(0, 1e-4),
            "ref_log_prob": old + rng.gauss(0, 0.1),
            "new_log_prob": old + rng.gauss(0, 0.2),
            "entropy": rng.random(),
            "advantage": 1.0 if index % 2 else -1.0,
            "value": None,
            "return_": None,
            "clipped": position % 9 == 0,
            "trained": position != length - 1,
            "version": step - 1,
        }
        for position in range(length)
    ]


def timeline(step: int, ranks: int) -> dict[str, Any]:
    sections = []
    start = 0.0
    for name, method, seconds in (
        ("reshard", "rollout.reshard", 0.5),
        ("rollout", "rollout.generate", 6.0),
        ("score", "actor.compute_log_probs", 2.0),
        ("advantage", "", 0.2),
        ("update", "actor.update", 3.5),
    ):
        spans = [
            [{"method": method, "start": start, "seconds": seconds * (1 - rank / 20)}]
            if method
            else []
            for rank in range(ranks)
        ]
        sections.append({"name": name, "start": start, "seconds": seconds, "ranks": spans})
        start += seconds
    return {"step": step, "seconds": 12.5, "num_ranks": ranks, "sections": sections}


# Overrides that `hybridrl train` adds to those that were typed.
ADDED = ["hardware=cpu", "hardware.reason='this machine has no GPU'", "hydra.run.dir='/runs/made'"]


def manifest(steps: int, overrides: list[str]) -> dict[str, Any]:
    values = dict(text.lstrip("+").split("=") for text in overrides)
    config = {
        "trainer": {"total_steps": steps},
        "model": {"path": "embedded", "init": "pretrained"},
        "algorithm": {"advantage": "grpo", "loss": {"function": "ppo_clip"}},
        "actor": {"optim": {"lr": float(values.get("actor.optim.lr", 1e-5))}},
    }
    node = {"name": "one", "cores": 2, "memory_bytes": 2**34, "gpus": [], "gpu_error": ""}
    data = {"name": "", "source": "embedded", "share": 1.0, "train": 400, "held_out": 16}
    return {
        "run": "made",
        "seed": 1,
        "started": "2026-01-01T10:00:00+00:00",
        "argv": ["hybridrl/main.py", *overrides, *ADDED],
        "overrides": overrides,
        "config_dirs": [],
        "resumed_from": None,
        "config": config,
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "git": {"commit": "0123456789abcdef", "dirty": True},
        "hardware": {"nodes": [node]},
        "data": [data | {"left_out": {"longer than 192 tokens": 2}}],
        "platform": "Linux",
        "earlier_starts": [],
    }


def write_run(
    folder: Path,
    steps: int,
    *,
    every: int = 10,
    prompts: int = 64,
    words: int = 20,
    tokens: int = 40,
    ranks: int = 2,
    others: int = 0,
    overrides: tuple[str, ...] = ("+recipe=gsm8k_grpo",),
) -> Path:
    """Write the folder of a finished run; every `every`-th step is recorded; return `folder`."""
    rng = Random(0)
    for name in ("rollouts", "tokens"):
        (folder / name).mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps(manifest(steps, list(overrides))))
    rows = [metrics_row(step, rng, others) for step in range(steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = []
    for step in range(every, steps + 1, every):
        drawn = [(step * 7 + index) % len(QUESTIONS) for index in range(prompts)]
        records = [
            response(step, index, prompt, rng, words)
            for prompt in drawn
            for index in range(PER_PROMPT)
        ]
        write_lines(folder / "rollouts" / f"step_{step}.jsonl", records)
        held_out = [response(step, 0, prompt, rng, words) for prompt in range(16)]
        kinds = [record | {"kind": kind} for record in held_out for kind in ("sampled", "greedy")]
        write_lines(folder / "rollouts" / f"eval_step_{step}.jsonl", kinds)
        if tokens:
            table = [row for index in range(4) for row in token_rows(step, index, tokens, rng)]
            parquet.write_table(
                pyarrow.Table.from_pylist(table), folder / "tokens" / f"step_{step}.parquet"
            )
        lines.append(timeline(step, ranks))
    write_lines(folder / "timeline.jsonl", lines)
    (folder / ".lock").write_text(f"process 1 on {socket.gethostname()}\n")
    end = {"status": "ok", "seconds": 12.5 * steps + 60, "error": ""}
    (folder / "result.json").write_text(json.dumps(end))
    (folder / "main.log").write_text(
        "[2026-01-01 10:00:01,000][hybridrl.x][INFO] - nothing to see\n"
        "[2026-01-01 10:01:02,345][hybridrl.app.launch][WARNING] - The run starts anew\n"
        "from step 3: restart 1\n"
    )
    return folder


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def make_run(
    folder: Path,
    started: str = "10:00",
    status: str | None = None,
    lock: str = HERE,
    **manifest: object,
) -> Path:
    """Leave what a run leaves after two of five steps."""
    (folder / "checkpoints" / "step_00000002").mkdir(parents=True)
    (folder / "checkpoints" / "step_00000002" / "manifest.json").write_text('{"step": 2}')
    (folder / ".lock").write_text(lock)
    facts = {"run": "mine", "config": {"trainer": {"total_steps": 5}}, "directory": str(folder)}
    facts |= {"started": f"2026-01-01T{started}:00+00:00", "overrides": [], "config_dirs": []}
    (folder / "manifest.json").write_text(json.dumps(facts | manifest))
    lines = [json.dumps(row) + "\n" for row in METRICS]
    (folder / "metrics.jsonl").write_text("".join(lines))
    if status is not None:
        (folder / "result.json").write_text(json.dumps({"status": status}))
    return folder
