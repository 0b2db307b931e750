"""Small real checkpoints, light enough for child processes that are killed."""

import random
import time
from collections.abc import Callable
from pathlib import Path

from hybridrl.checkpoint import commit
from hybridrl.checkpoint import manifest as manifests
from hybridrl.checkpoint.commit import finish_deletions, prune
from hybridrl.checkpoint.files import DRIVER, STATE, checkpoints_folder, step_name
from hybridrl.checkpoint.manifest import FileRecord, Manifest
from hybridrl.checkpoint.verification import digest

SHARDS = tuple(f"state/shard-{k:05d}-model-00001-of-00001.safetensors" for k in (1, 2))
FILES = (*SHARDS, DRIVER)
SIZE = 4096  # bytes of each file of the state


def save(run_dir: Path, step: int, phases: list[str] | None = None, **metrics: float) -> Path:
    """Save a checkpoint as a run does.

    Args:
        run_dir: the run's directory.
        step: after which it is taken.
        phases: gets the name of each phase as it begins.
        metrics: of the step.
    """
    began = [] if phases is None else phases
    began.append("begin")
    partial = commit.begin(run_dir, step)
    began.append("state")
    for name in SHARDS:
        (partial / name).write_bytes(content(step, name))
    began.append("driver")
    (partial / DRIVER).write_bytes(content(step, DRIVER))
    began.append("commit")
    return commit.commit(partial, manifest_of(partial, step, **metrics))


def pruned(run_dir: Path, keep_last: int, best: str | None = None) -> list[Path]:
    """Prune a run's checkpoints, and remove what has gone at once."""
    gone = prune(run_dir, keep_last, best)
    finish_deletions(checkpoints_folder(run_dir))
    return gone


def content(step: int, name: str) -> bytes:
    """The bytes of a file of the checkpoint of a step."""
    return random.Random(f"{step} {name}").randbytes(SIZE)


def manifest_of(folder: Path, step: int, **metrics: float | None) -> Manifest:
    """The manifest of the files that are in a folder."""
    return manifest(step, {name: digest(folder / name) for name in FILES}, **metrics)


def manifest(step: int, files: dict[str, FileRecord], **metrics: float | None) -> Manifest:
    """A manifest of these files."""
    return Manifest(
        step=step,
        created="2026-01-02T03:04:05+00:00",
        config={"seed": 1, "actor": {"lr": 1e-06, "sizes": [1, 2]}},
        versions={"python": "3.11.7", "torch": "2.11.0"},
        world_size=2,
        metrics=metrics,
        files=files,
        models={"model.path": {"config.json": "0" * 64}},
    )


def flip_one_bit(file: Path) -> None:
    """Turn the bit in the middle over."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def huge_checkpoint(run_dir: Path) -> Path:
    """A checkpoint that takes half a minute to read at the least, and no room on the disk."""
    folder, size = checkpoints_folder(run_dir) / step_name(20), 64 * 2**30
    (folder / STATE).mkdir(parents=True)
    with (folder / SHARDS[0]).open("wb") as file:
        file.truncate(size)
    manifests.write(folder, manifest(20, {SHARDS[0]: FileRecord(size, "0" * 64)}))
    return folder


def hidden(run_dir: Path) -> list[str]:
    """Names of what is hidden among a run's checkpoints."""
    return sorted(p.name for p in (run_dir / "checkpoints").iterdir() if p.name[0] == ".")


def wait_until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for a condition at most so long."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)
