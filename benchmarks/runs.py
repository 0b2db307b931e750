"""Runs of the real command, in a process of their own."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def metrics_of_run(
    overrides: Sequence[str], run_dir: Path, gpu: int | None = None
) -> list[dict[str, Any]]:
    """Train with the command line's `overrides` into a folder; return the rows of its metrics.

    The output goes to stderr. With `gpu` the run sees this GPU alone.

    Raises:
        SystemExit: the run failed.
    """
    command = [sys.executable, "-m", "hybridrl.main", *overrides, f"hydra.run.dir={run_dir}"]
    env = os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)})
    done = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, env=env)
    if done.returncode:
        raise SystemExit(f"the run in {run_dir} failed with exit code {done.returncode}")
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
