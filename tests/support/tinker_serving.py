"""A server of `hybridrl tinker` in a process of its own, and folders that the cookbook reads."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridrl.models.resolve import EMBEDDED_FOLDER
from tests.support.runs import ROOT

KEY = "tml-test"
# A name that the cookbook knows, with its plain renderer.
COOKBOOK_NAME = "Qwen/Qwen3-8B-Base"
# Of `tinker_cookbook.recipes.rl_loop`.
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
PROBLEM = "0 + 7?"
PREFIX = [
    {"role": "user", "content": f"How many r's are in strawberry?{SUFFIX}"},
    {
        "role": "assistant",
        "content": "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a "
        "5) w 6) b 7) e 8) r 9) r 10) y. We have r's at positions 3, 8, and 9. \\boxed{3}",
    },
]
CARD = """---
configs:
- config_name: {}
  data_files:
  - split: train
    path: train.jsonl
---
"""


class Served(NamedTuple):
    """A server that runs."""

    url: str
    process: subprocess.Popen[str]

    def kill(self) -> None:
        """End it without a chance to write anything, and its workers."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def served(folder: Path, model: str, *arguments: str) -> Iterator[Served]:
    """Serve a model until the end of the block."""
    command = [sys.executable, "-m", "hybridrl.cli", "tinker", model, "--key", KEY]
    command += ["--folder", str(folder), "--name", COOKBOOK_NAME, "hardware=cpu", *arguments]
    log = folder.with_suffix(".log")
    with log.open("a") as errors:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    server = Served("", process)
    try:
        assert process.stdout is not None
        line = next((one for one in process.stdout if one.startswith("export TINKER")), None)
        assert line is not None, log.read_text()[-2000:]
        url, key = (word.partition("=")[2] for word in line.split()[1:])
        assert key == KEY
        yield server._replace(url=url)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 128 + signal.SIGTERM
    finally:
        server.kill()


def write_cookbook_folder(folder: Path, conversations: int, problems: int) -> Path:
    """Make a working folder in which the cookbook finds its data sets and the model by name.

    Conversations end with any digit, one in four after those of `rl_loop`; all problems have the
    answer 7. Returns the model's folder.
    """
    draw = random.Random(1)

    def conversation(index: int) -> list[dict[str, str]]:
        turns = [
            {"role": "user", "content": PROBLEM + SUFFIX},
            {"role": "assistant", "content": f"\\boxed{{{draw.randrange(10)}}}"},
        ]
        return [*PREFIX, *turns] if index % 4 == 0 else turns

    rows: list[dict[str, object]] = [{"messages": conversation(i)} for i in range(conversations)]
    _write(folder / "HuggingFaceH4" / "no_robots", "default", rows)
    rows = [{"question": PROBLEM, "answer": "#### 7"}] * problems
    _write(folder / "openai" / "gsm8k", "main", rows)
    model = folder / COOKBOOK_NAME
    _save_model(model)
    return model


def _save_model(folder: Path) -> None:
    """Save the embedded model, ready for tokens that it has never seen.

    Their embeddings have kept the large norm with which they began, and all predictions are far
    from them: with smaller ones a few steps are enough.
    """
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_FOLDER, dtype=torch.float32)
    weight = model.get_input_embeddings().weight
    unseen = weight.norm(dim=1) > 2
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        weight[unseen] = 0.1 * torch.randn(int(unseen.sum()), weight.shape[1], generator=draw)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(EMBEDDED_FOLDER).save_pretrained(folder)


def _write(folder: Path, config: str, rows: Sequence[dict[str, object]]) -> None:
    folder.mkdir(parents=True)
    (folder / "README.md").write_text(CARD.format(config))
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_recipe(name: str, folder: Path, url: str, **settings: object) -> list[dict[str, float]]:
    """Run a recipe of the cookbook as its users do; return the metrics of its steps."""
    log_path = folder / name
    command = [sys.executable, "-m", f"tinker_cookbook.recipes.{name}", f"log_path={log_path}"]
    command += [f"{key}={value}" for key, value in settings.items()]
    variables = {
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": KEY,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hf"),
    }
    start = time.monotonic()
    done = subprocess.run(
        command, cwd=folder, env=os.environ | variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    print(f"{name}: {time.monotonic() - start:.0f} s")
    lines = (log_path / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
