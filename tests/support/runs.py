"""Starts `python -m hybridrl.main` as a user would and looks at what it leaves."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridrl.controller.rendezvous import FILE_PREFIX
from tests.support.sockets import Listener, listening, still_open

ROOT = Path(__file__).resolve().parents[2]
# Until the helpers of killed processes have ended.
CLEANUP_S = 60.0

# A run of seconds: two steps on a few problems.
SMALL = [
    "+recipe=gsm8k_ppo",
    "hardware=cpu",
    "trainer.total_steps=2",
    "data.prompts_per_step=8",
    "rollout.responses_per_prompt=4",
    "actor.mini_batch_size=16",
    "data.num_eval_problems=20",
    "eval.every_steps=0",
    "eval.samples=1",
    "tracking.report=false",
]


@dataclass
class Run:
    """A program started in a session, temporary folder and environment of its own.

    Attributes:
        process: the program itself.
        token: in the environment of all processes that it starts.
        temporary: its folder.
        run_dir: where it writes.
        shared_memory: names in /dev/shm that one of its processes was seen to map or to hold.
        listeners: sockets that `listening` has seen.
    """

    process: subprocess.Popen[str]
    token: str
    temporary: Path
    run_dir: Path
    shared_memory: set[str] = field(default_factory=set)
    listeners: set[Listener] = field(default_factory=set)

    def output(self, timeout: float = 240) -> str:
        """Wait for the end; stdout and stderr together."""
        out, _ = self.process.communicate(timeout=timeout)
        return out

    def ended(self, code: int = 0, timeout: float = 240) -> str:
        """Wait for the end with this exit code, after which nothing is left; the output."""
        output = self.output(timeout)
        assert self.process.returncode == code, output
        self.assert_nothing_left()
        return output

    def metrics(self) -> list[dict]:
        """The rows of metrics.jsonl."""
        return [
            json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()
        ]

    def processes(self) -> dict[int, str]:
        """Living processes that this run started, by their inherited token."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self.token.encode() in (folder / "environ").read_bytes():
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(folder.name)] = command.decode(errors="replace")
        return found

    def listening(self) -> list[Listener]:
        """Where its processes listen; at the end nobody may have these sockets any more."""
        found = listening(self.processes())
        self.listeners |= {*found}
        return found

    def wait_for(self, needle: str, timeout: float = 180) -> None:
        """Block until metrics.jsonl or a worker's log holds `needle`."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            files = [self.run_dir / "metrics.jsonl", *self.run_dir.glob("logs/*.log")]
            if any(path.exists() and needle in path.read_text() for path in files):
                return
            assert self.process.poll() is None, self.output()
            time.sleep(0.2)
        raise AssertionError(f"{needle!r} did not appear within {timeout} s")

    def assert_nothing_left(self) -> None:
        """No process, known socket, temporary file or shared memory of this run remains."""
        left = {
            "processes": self.processes(),
            "sockets": still_open(self.listeners),
            "temporary files": sorted(str(path) for path in self.temporary.rglob("*")),
            "shared memory": sorted(abandoned(self.shared_memory)),
        }
        assert not any(left.values()), left

    def watch_shared_memory(self, ended: threading.Event) -> None:
        """Note twice a second what its processes use, as names alone do not say whose they are."""
        while not ended.wait(0.5):
            processes = self.processes()
            self.shared_memory |= mapped(processes) | rendezvous_of(processes)


def abandoned(names: set[str]) -> set[str]:
    """Those of a run's names that are left in /dev/shm.

    The helper that removes the memory of a killed process ends after it: it gets time.
    """
    deadline = time.monotonic() + CLEANUP_S
    while True:
        left = {file.name for file in Path("/dev/shm").iterdir()} & names
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.5)


def rendezvous_of(processes: Iterable[int]) -> set[str]:
    """Names of the rendezvous files whose rank 0 is one of the processes."""
    names = set()
    for path in Path("/dev/shm").glob(f"{FILE_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):  # gone meanwhile
            found = re.search(rb" pid (\d+)", path.read_bytes())
            if found and int(found[1]) in processes:
                names.add(path.name)
    return names


def mapped(processes: Iterable[int]) -> set[str]:
    """Names in /dev/shm that some processes map.

    Files are known by their inodes: a named semaphore is made under another name than it has.
    """
    inodes: set[str] = set()
    for pid in processes:
        with contextlib.suppress(OSError):
            inodes |= set(re.findall(r" (\d+) +/dev/shm/", Path(f"/proc/{pid}/maps").read_text()))
    names = set()
    for path in Path("/dev/shm").iterdir():
        with contextlib.suppress(FileNotFoundError):  # gone meanwhile
            if str(path.stat().st_ino) in inodes:
                names.add(path.name)
    return names


@contextlib.contextmanager
def started(
    run_dir: Path, *overrides: str, env: dict[str, str] | None = None, **options: Any
) -> Iterator[Run]:
    """Start a run; whatever of it is left at the end of the block is killed and removed."""
    arguments = [*overrides, f"hydra.run.dir={run_dir}"]
    with launched(run_dir, "hybridrl.main", *arguments, env=env, **options) as run:
        yield run


@contextlib.contextmanager
def launched(
    folder: Path, module: str, *arguments: str, env: dict[str, str] | None = None, **options: Any
) -> Iterator[Run]:
    """Start a module of ours as a program in a folder; else as `started`.

    Args:
        folder: where.
        module: which.
        arguments: of the program.
        env: variables to be added.
        options: of Popen, in place of a session of its own whose output is a pipe.
    """
    token = f"hybridrl-test-{uuid.uuid4()}"
    temporary = Path(tempfile.mkdtemp(prefix="h"))  # short: sockets have length limits
    folder.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=folder,
        env=os.environ
        | {"HYBRIDRL_TEST_RUN": token, "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)}
        | (env or {}),
        **{
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "text": True,
            "start_new_session": True,
        }
        | options,
    )
    run = Run(process, token, temporary, folder)
    ended = threading.Event()
    watcher = threading.Thread(target=run.watch_shared_memory, args=(ended,), daemon=True)
    watcher.start()
    try:
        yield run
    finally:
        ended.set()
        watcher.join()
        for pid in run.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        process.wait()
        shutil.rmtree(temporary, ignore_errors=True)
