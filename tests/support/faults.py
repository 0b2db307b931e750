"""Hits processes of a run in a phase that they are seen to be in, and follows what it does."""

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import psutil

from hybridrl.controller.watch.process_snapshot import state_of
from hybridrl.distributed.position import Position, PositionReader, open_position
from tests.support.runs import SMALL, Run, started

# As docs/reliability.md promises: from the signal, or from the end of cluster.stall_timeout_s.
TOLD_S = 60.0
STALL_S = 8
LONGEST_S = 150.0
# A restart begins when all of the start before has gone.
GONE_S = 5.0
# Phases of so small a model are over in some ten milliseconds.
LOOK_S = 0.0005
GONE = ("", "X", "Z")
# Two ranks; a checkpoint after each step; nothing that a fault has no need of.
RUN = [
    *SMALL,
    "cluster.gpus_per_node=2",
    f"cluster.stall_timeout_s={STALL_S}",
    "checkpoint.every_steps=1",
    "data.num_eval_problems=4",
    "reward.timeout_s=0.5",
    "trainer.save_final_model=false",
    "~eval.rules.flexible",  # its reward process works at evaluations only
]


STEP_0 = " of step 0"


class Victim(StrEnum):
    """Whom a signal is for."""

    driver = "driver"
    rank0 = "rank 0"
    rank1 = "rank 1"
    reward = "reward process"
    raylet = "raylet"
    gcs = "GCS"


RANKS = (Victim.rank0, Victim.rank1)


class Phase(StrEnum):
    """What the workers are at, as they publish it."""

    start = "start: preload"
    build = "start: rollout"
    evaluate = f"rollout.generate{STEP_0}"
    reshard = "rollout.reshard"
    rollout = "rollout.generate"
    score = "actor.compute_log_probs"
    update = "actor.update"
    save = "saver.begin_save"
    ahead = "rollout.generate_ahead"
    send = "sender.send"


class Fault(NamedTuple):
    """A signal for somebody in a phase."""

    victim: Victim
    signum: signal.Signals
    phase: Phase

    def __str__(self) -> str:
        return f"{self.signum.name} to {self.victim} in {self.phase}"


@dataclass
class Faulty:
    """A run that is hit.

    Attributes:
        run: as it was started.
        lines: what it prints, and when it came.
        present: processes that it had when it was hit last.
        known: processes that it had when it was hit, each time.
    """

    run: Run
    lines: list[tuple[float, str]] = field(default_factory=list)
    present: set[int] = field(default_factory=set)
    known: set[psutil.Process] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.reader = threading.Thread(target=self.follow, daemon=True)
        self.reader.start()

    def follow(self) -> None:
        """Read what it prints, to the end."""
        for line in self.run.process.stdout:
            self.lines.append((time.monotonic(), line))

    @property
    def text(self) -> str:
        """All that it has printed so far."""
        return "".join(line for _, line in self.lines)

    def hit(self, fault: Fault, spared: set[int]) -> int:
        """Send the signal when the victim is there and the workers are in the phase.

        Args:
            fault: whom, with what, and when.
            spared: processes of earlier starts.

        Returns:
            The victim's process id.
        """
        deadline = time.monotonic() + LONGEST_S
        while time.monotonic() < deadline:
            assert self.run.process.poll() is None, f"{fault}: the run has ended\n{self.text}"
            for pid in self._clocks(fault, spared):
                if (victim := self._strike(pid, fault, spared)) is not None:
                    self.present = set(self.run.processes())
                    return victim
            time.sleep(0.02)
        raise AssertionError(f"{fault}: nobody came there within {LONGEST_S} s\n{self.text}")

    def await_line(self, pattern: str, since: float, seconds: float) -> None:
        """Wait until a line is printed, not later than so many seconds after an instant."""
        deadline = since + seconds
        while not any(at >= since and re.search(pattern, line) for at, line in list(self.lines)):
            late = time.monotonic() > deadline
            assert not late, f"{pattern!r} was not printed in {seconds} s\n{self.text}"
            ended = not self.reader.is_alive()
            assert not ended, f"the run ended without {pattern!r}\n{self.text}"
            time.sleep(0.1)

    def pids(self, victim: Victim) -> list[int]:
        """Processes of a role, of all starts that still live."""
        if victim is Victim.driver:
            return [self.run.process.pid]
        found = self.run.processes()
        return [pid for pid, title in found.items() if role_of(pid, title) == victim]

    def look(self) -> None:
        """Keep which processes there are, and where they listen."""
        for pid in self.run.processes():
            with suppress(psutil.NoSuchProcess):
                self.known.add(psutil.Process(pid))
        self.run.listening()

    def await_end_of_known(self) -> None:
        """Wait until no process but the driver lives of those that were there when it was hit."""
        deadline = time.monotonic() + GONE_S
        while left := [process for process in self.known if self._lives_on(process)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.1)

    def _lives_on(self, process: psutil.Process) -> bool:
        is_driver = process.pid == self.run.process.pid
        return not is_driver and process.is_running() and state_of(process.pid) not in GONE

    def workers(self) -> list[int]:
        """All workers, also those without a rank yet."""
        return [pid for pid, title in self.run.processes().items() if "WorkerHost" in title]

    def steps(self) -> list[int]:
        """Steps in metrics.jsonl."""
        return [row["step"] for row in self.run.metrics()]

    def _clocks(self, fault: Fault, spared: set[int]) -> list[int]:
        """The worker whose position tells the phase: the victim itself, where it is one."""
        if fault.phase is Phase.start:
            found = self.workers()
        else:
            rank = fault.victim if fault.victim in RANKS else Victim.rank0
            found = self.pids(rank)
        return [pid for pid in found if pid not in spared][:1]

    def _strike(self, clock: int, fault: Fault, spared: set[int]) -> int | None:
        """Hit the victim while the clock stands still in the phase; None if that cannot be."""
        reader = open_position(clock)
        if reader is None:
            return None
        try:
            if not _comes_to(reader, clock, fault.phase):
                return None
            os.kill(clock, signal.SIGSTOP)
            while state_of(clock) not in ("T", *GONE):
                time.sleep(LOOK_S)
            victims = [clock] if fault.victim in RANKS else self.pids(fault.victim)
            victims = [pid for pid in victims if pid not in spared and state_of(pid) not in GONE]
            if not victims or not _is_in(reader.read(), fault.phase):
                os.kill(clock, signal.SIGCONT)
                return None
            self.look()
            os.kill(victims[0], fault.signum)
            if victims[0] != clock:
                os.kill(clock, signal.SIGCONT)
            return victims[0]
        finally:
            reader.close()


def _comes_to(reader: PositionReader, pid: int, phase: Phase) -> bool:
    """Wait a little until a process is in a phase."""
    end = time.monotonic() + 5.0
    while not _is_in(reader.read(), phase):
        if time.monotonic() > end or state_of(pid) in GONE:
            return False
        time.sleep(LOOK_S)
    return True


def _is_in(position: Position, phase: Phase) -> bool:
    name = phase.removesuffix(STEP_0)
    return position.phase == name and not position.is_idle


def role_of(pid: int, title: str) -> str:
    """Whose process it is, as `Victim` says it; empty of others, and of one that is gone."""
    with suppress(psutil.Error, OSError):
        if "processes.child" in title:  # of its supervisor, too, which computes nothing
            parent = psutil.Process(pid).parent()
            is_worker = parent is not None and "processes.child" in " ".join(parent.cmdline())
            return Victim.reward if is_worker else ""
        if "WorkerHost" in title:
            return rank_of(pid)
        return {"raylet": Victim.raylet, "gcs_server": Victim.gcs}.get(
            psutil.Process(pid).name(), ""
        )
    return ""


def rank_of(pid: int) -> str:
    """ "rank 1", by the name of the log that a process writes to; empty if it has no rank."""
    found = re.search(r"_rank(\d+)\.log$", os.readlink(f"/proc/{pid}/fd/1"))
    return f"rank {found[1]}" if found else ""


@contextmanager
def faulty(run_dir: Path, *overrides: str) -> Iterator[Faulty]:
    """A run to be hit, whose output is read all the time."""
    with started(run_dir, *RUN, *overrides) as run:
        yield Faulty(run)


def told(fault: Fault, pid: int) -> list[str]:
    """What the run says of a fault, as patterns of lines."""
    if fault.victim in (Victim.raylet, Victim.gcs):
        how = "died" if fault.signum == signal.SIGKILL else "was stopped by a signal"
        return [rf"Ray's {fault.victim} \(pid {pid}\) on this machine {how}"]
    phase = fault.phase.removesuffix(STEP_0)
    if fault.signum == signal.SIGSTOP:
        stopped = rf"pid {pid}: .*stopped by a signal"
        limit = rf"for cluster.stall_timeout_s={STALL_S} s"
        if fault.phase is Phase.start:  # where nobody tells how far he is
            return [rf"has been stopped by a signal in .*{phase}.* {limit}", stopped]
        return [rf"made progress in .*{phase}.* {limit}", stopped]
    return [rf"rank \d+ on .* pid {pid} failed in .*{phase}.*: its process died"]
