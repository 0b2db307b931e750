"""Processes that save checkpoints and are killed on the way.

python -m tests.support.crash_cases each_call WORK    killed at every file call
python -m tests.support.crash_cases forever RUN            to be killed from outside
"""

import itertools
import os
import shutil
import signal
import sys
from pathlib import Path

from hybridrl.checkpoint.verification import newest_good
from tests.support.checkpoint_cases import pruned, save

# Python tells its audit hooks of these before it calls the system.
_CALLS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}


def each_call(work: Path) -> None:
    """Copy WORK/run to WORK/0, WORK/1, ... and let a process die at that call of a save in each.

    The last one gets through; its number is printed.
    """
    for n in itertools.count():
        run_dir = shutil.copytree(work / "run", work / str(n))
        pid = os.fork()
        if pid == 0:
            _die_at(n)
            save(run_dir, 30, generation=2)
            pruned(run_dir, keep_last=1)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if status == 0:
            print(n)
            return
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status


def forever(run_dir: Path) -> None:
    """Go on from the newest checkpoint; report commits."""
    found = newest_good(run_dir)
    step, generation = (0, 0) if found is None else (found.manifest.step, _generation(found))
    while True:
        step += 1
        generation += 1
        save(run_dir, step, generation=generation)
        os.write(1, f"{generation}\n".encode())
        pruned(run_dir, keep_last=2)


def _generation(found) -> int:
    return found.manifest.metrics["generation"]


def _die_at(n: int) -> None:
    calls = itertools.count()

    def hook(event: str, _: object) -> None:
        if event in _CALLS and next(calls) == n:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


if __name__ == "__main__":
    if sys.argv[1] == "each_call":
        each_call(Path(sys.argv[2]))
    else:
        forever(Path(sys.argv[2]))
