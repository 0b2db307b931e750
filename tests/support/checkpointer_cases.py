"""The driver's part of a save and a real SaverWorker in one process, on a small disk of their own.

Run in a mount namespace of its own.
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.checkpoint.files import checkpoints_folder
from hybridrl.checkpoint.verification import newest_good
from hybridrl.config.schema import RoleConfig
from hybridrl.distributed.mesh import build_mesh
from hybridrl.trainer.checkpointing.checkpointer import LOOK_S, Checkpointer
from hybridrl.trainer.record import StepRecord
from hybridrl.trainer.state import LoopState
from hybridrl.workers.base import Dispatch, Worker, dispatch_of
from hybridrl.workers.saver import SaverWorker
from tests.support.checkpoint_cases import wait_until
from tests.support.role_configs import fsdp_config, saver_config
from tests.support.run_configs import run_config

DISK = 16 * 2**20  # bytes; of which a checkpoint takes a little more than one MiB


class Weights(Worker):
    """A role of 1 MiB."""

    config_class = RoleConfig
    weights = torch.arange(2**18, dtype=torch.float32)

    def training_state(self) -> dict[str, Tensor]:
        return {"weights": self.weights}


class RoleHere:
    """A role of this process alone, called as a WorkerGroup of one rank is."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def call(self, method: str, *args: Any) -> list[Any]:
        assert dispatch_of(type(self.worker), method) is Dispatch.BROADCAST
        return [getattr(self.worker, method)(*args)]


@dataclass
class After:
    """What there is when a save is over.

    Attributes:
        failures: of the run so far.
        warnings: since the save before.
        names: of all in the run's folder of checkpoints.
        newest: the step of the newest checkpoint that is whole, checksums compared.
    """

    failures: int
    warnings: list[str]
    names: list[str]
    newest: int | None


class OneProcess:
    """A run's checkpoints.

    Args:
        run_dir: of the run; a disk of DISK bytes.
        overrides: of the run's config.
    """

    def __init__(self, run_dir: Path, *overrides: str) -> None:
        spec = fsdp_config(dp_shard=1)
        mesh = build_mesh(spec, "cpu")
        saver = SaverWorker(saver_config(), mesh)
        saver.connect({"actor": Weights(None, mesh), "saver": saver})
        self.saver = saver
        self.run_dir = run_dir
        self.warnings: list[str] = []
        config = run_config("checkpoint.every_steps=1", *overrides)
        self.checkpoints = Checkpointer(
            config, run_dir, RoleHere(saver), lambda: None, self.warnings.append, models={}
        )

    def begin(self, step: int, **metrics: float | None) -> None:
        """Begin a save as the loop does, and log the step's metrics."""
        self.warnings.clear()
        self.checkpoints.begin(state(step))
        self.checkpoints.after(StepRecord(step, metrics, None, None))

    def save(self, step: int, **metrics: float | None) -> After:
        """Save a step's checkpoint and wait for it."""
        self.begin(step, **metrics)
        self.checkpoints.finish()
        return self.after()

    def after(self) -> After:
        found = newest_good(self.run_dir)
        return After(
            self.checkpoints.failures,
            list(self.warnings),
            sorted(os.listdir(checkpoints_folder(self.run_dir))),
            None if found is None else found.manifest.step,
        )

    @contextmanager
    def filled(self, room: int = 0) -> Iterator[None]:
        """The disk with so many free bytes, until the end of the block."""
        facts = os.statvfs(self.run_dir)
        filler = self.run_dir / "filler"
        filler.write_bytes(bytes(facts.f_bfree * facts.f_frsize - room))
        yield
        filler.unlink()


def state(step: int) -> LoopState:
    """That of a loop after a step."""
    return LoopState(step, 8 * step, {}, None, step, True, {}, {})


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=0, world_size=1)
        yield
        dist.destroy_process_group()


def everything(disk: Path) -> dict[str, Any]:
    """What each of the cases finds, on an empty disk, by its name."""
    found = {}
    with one_rank():
        for case in (full_disks, by_itself, not_removed, slowly_removed, without_the_metric):
            (disk / case.__name__).mkdir()
            found[case.__name__] = case(disk / case.__name__)
    return found


def full_disks(run_dir: Path) -> dict[str, After]:
    """Saves while there is no room, for each part of a save; one in good times before and after."""
    found, run = {}, OneProcess(run_dir, "checkpoint.keep_last=2")
    with run.filled(room=2**16):
        found["the first of all"] = run.save(1)
    found["before"] = run.save(2)
    with run.filled():
        found["driver.json"] = run.save(3)
    with run.filled(room=2**16):
        found["shards"] = run.save(4)
        assert run.checkpoints.save_now(state(5)) is None
    found["at the end"] = run.after()
    run.warnings.clear()
    run.checkpoints.begin(state(6))
    run.saver.saving.result(60.0)
    with run.filled():
        run.checkpoints.after(StepRecord(6, {}, None, None))
        run.checkpoints.poll()
        found["manifest"] = run.after()
    found["after"] = run.save(7)
    assert run.checkpoints.save_now(state(7)) == run.checkpoints.newest
    return found


def by_itself(run_dir: Path) -> dict[str, After]:
    """Saves during a step that does not end: before its metrics are known, then; without room."""
    found, run = {}, OneProcess(run_dir)

    def is_over() -> bool:
        return not any(name.endswith(".partial") for name in run.after().names)

    run.checkpoints.begin(state(1))
    run.saver.saving.result(60.0)
    time.sleep(3 * LOOK_S)
    found["not reported"] = run.after()
    run.checkpoints.after(StepRecord(1, {}, None, None))
    wait_until(is_over, seconds=20.0)
    found["reported"] = run.after()
    run.checkpoints.finish()
    with run.filled(room=2**16):
        run.begin(2)
        wait_until(is_over, seconds=20.0)
        found["no room"] = run.after()
    run.checkpoints.finish()
    return found


def not_removed(run_dir: Path) -> dict[str, list[After]]:
    """Saves after two, as the first cannot go: something is mounted in its place, or in it."""
    found = {}
    for place in ("", "driver.json"):
        (run_dir / f"run_{place}").mkdir()
        run = OneProcess(run_dir / f"run_{place}", "checkpoint.keep_last=2")
        run.save(1)
        run.save(2)
        path = str(checkpoints_folder(run.run_dir) / "step_00000001" / place)
        subprocess.run(["mount", "--bind", path, path], check=True)
        found[place] = [run.save(3), run.save(4)]
    return found


def slowly_removed(run_dir: Path) -> list[After]:
    """The second save as the loop commits it, of which the first cannot go yet; and at the end."""
    run, may_go = OneProcess(run_dir, "checkpoint.keep_last=1"), threading.Event()
    run.save(1)

    def hook(event: str, _: object) -> None:
        if event == "os.remove" and threading.current_thread().name == "removal":
            may_go.wait(10.0)

    sys.addaudithook(hook)
    run.begin(2)
    run.saver.saving.result(60.0)
    run.checkpoints.poll()
    meanwhile = run.after()
    may_go.set()
    run.checkpoints.finish()
    return [meanwhile, run.after()]


def without_the_metric(run_dir: Path) -> list[list[str]]:
    """What is said after each of five saves, of which all but the first and fourth lack it."""
    run = OneProcess(run_dir, "checkpoint.keep_last=1", "checkpoint.keep_best=a/good")
    rows = [{"a/good": 3.0}, {"a/goods": 2.0}, {"a/good": None}, {"a/good": 1.0}, {}]
    said = [run.save(step, **row).warnings for step, row in enumerate(rows, start=1)]
    assert run.after().names == ["step_00000001", "step_00000005"]
    return said
