"""A checkpoint to resume from, made without a run: its tensors are not those of a model."""

from pathlib import Path

from hybridrl.checkpoint import commit
from hybridrl.checkpoint.files import DRIVER
from hybridrl.checkpoint.manifest import Manifest
from hybridrl.checkpoint.verification import digest
from hybridrl.config.schema import RunConfig
from hybridrl.trainer.state import LoopState
from hybridrl.trainer.tracking.provenance import plain
from tests.support.checkpoint_cases import FILES, SHARDS, content

PROMPTS = {"tokens": "0" * 64, "rows": "1" * 64}


def resumable(
    run_dir: Path,
    config: RunConfig,
    models: dict[str, dict[str, str]],
    prompts: dict[str, str] = PROMPTS,
    step: int = 4,
) -> Path:
    """Save a checkpoint of a run with this config; its folder."""
    run_dir.mkdir(exist_ok=True)
    partial = commit.begin(run_dir, step)
    for name in SHARDS:
        (partial / name).write_bytes(content(step, name))
    state = LoopState(step, 0, prompts, None, step, False, {}, {})
    (partial / DRIVER).write_bytes(state.encode())
    files = {name: digest(partial / name) for name in FILES}
    when = "2026-01-02T03:04:05+00:00"
    return commit.commit(partial, Manifest(step, when, plain(config), {}, 1, {}, files, models))
