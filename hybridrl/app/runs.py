"""Runs on disk: where they are, how far they got, and how they ended."""

import fcntl
import json
import os
import re
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from hybridrl.app.lock import LOCK_FILE
from hybridrl.trainer.tracking.provenance import MANIFEST_FILE
from hybridrl.trainer.tracking.tracker import METRICS_FILE, read_metrics

# Holds how a run or a job of a sweep ended (sweep.py:JobResult).
RESULT_FILE = "result.json"
# status of a result -> state of the run.
STATES = {"ok": "finished", "failed": "failed", "stopped": "stopped"}


class Progress(NamedTuple):
    """Numbers of a run so far, None if unknown: of the last evaluation, and of the last step."""

    step: int | None
    accuracy: float | None
    ci95: float | None
    reward: float | None
    kl: float | None


@dataclass(frozen=True)
class RunOnDisk:
    """A run that was started: its folder, and its manifest (provenance.py:write_manifest)."""

    folder: Path
    manifest: Mapping[str, Any]

    @property
    def name(self) -> str:
        """run.name."""
        return str(self.manifest["run"])

    @property
    def started(self) -> datetime:
        """The last start, with time zone."""
        return datetime.fromisoformat(self.manifest["started"])

    @property
    def total_steps(self) -> int:
        """trainer.total_steps."""
        return int(self.manifest["config"]["trainer"]["total_steps"])


def accuracy_text(accuracy: float | None, ci95: float | None) -> str:
    """Format an accuracy with the half-width of its interval, if known."""
    interval = "" if ci95 is None else f" +- {ci95:.3f}"
    return "-" if accuracy is None else f"{accuracy:.3f}{interval}"


def progress(folder: Path) -> Progress:
    """Read a run's numbers from its metrics.jsonl."""
    rows = read_metrics(folder / METRICS_FILE)
    evaluated = [row for row in rows if row.get("eval/accuracy") is not None]
    last, scored = rows[-1] if rows else {}, evaluated[-1] if evaluated else {}
    return Progress(
        step=None if not rows else int(last["step"]),
        accuracy=scored.get("eval/accuracy"),
        ci95=scored.get("eval/ci95"),
        reward=last.get("reward/mean"),
        kl=last.get("actor/kl"),
    )


def run_at(folder: Path) -> RunOnDisk | None:
    """Return the run whose folder this is, or None; a checkpoint's manifest is another."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        run = RunOnDisk(folder, json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8")))
        if run.name and run.started and run.total_steps:
            return run
    return None


def keeps_result(folder: Path, earlier: RunOnDisk | None) -> bool:
    """Return whether a folder has the result of its run `earlier`, which a new start removes."""
    is_there = (folder / RESULT_FILE).exists()
    return is_there and earlier is not None and run_at(folder) == earlier


def find_runs(folders: Iterable[Path]) -> list[RunOnDisk]:
    """Return the runs in or below folders, newest start first; links are not followed."""
    runs = []
    for top in folders:
        for folder, inside, files in os.walk(top):
            run = run_at(Path(folder)) if MANIFEST_FILE in files else None
            inside[:] = [] if run is not None else [one for one in inside if one[0] != "."]
            runs += [run] if run is not None else []
    return sorted(runs, key=lambda run: (run.started, run.folder), reverse=True)


def state_of(run: RunOnDisk) -> str:
    """Return running | finished | stopped | failed | killed | unknown.

    A run holds its lock, and writes its result unless it is killed. The lock of a run on another
    machine is seen only where both lock the same file system.
    """
    owner = ""
    with suppress(OSError), (run.folder / LOCK_FILE).open() as lock:
        owner = lock.read(200)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return "running"
    with suppress(OSError, ValueError, KeyError, TypeError):
        return STATES[json.loads((run.folder / RESULT_FILE).read_text())["status"]]
    host = re.fullmatch(r"process \d+ on (\S+)\s*", owner)
    return "killed" if host and host[1] == socket.gethostname() else "unknown"
