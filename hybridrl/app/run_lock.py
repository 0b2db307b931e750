"""One run at a time in a run's directory."""

import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hybridrl.config.errors import ConfigError

log = logging.getLogger(__name__)

LOCK_FILE = ".lock"
WAIT_S = 5.0


@contextmanager
def sole_run(run_dir: Path) -> Iterator[None]:
    """The directory for this process alone, for the time of the block.

    The kernel gives it back when the process ends, however that is.

    Raises:
        ConfigError: another run is in it, as when a job was queued again before its end; or no file
            can be written there.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(run_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(
            f"hydra.run.dir = {run_dir} cannot be written to: {error.strerror}.\n"
            f"Set hydra.run.dir to a directory that can."
        ) from error
    try:
        _lock(run_dir, descriptor)
        yield
    finally:
        os.close(descriptor)


def _lock(run_dir: Path, descriptor: int) -> None:
    try:
        _wait_for(descriptor)
    except BlockingIOError:
        owner = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "a process"
        raise ConfigError(
            f"hydra.run.dir = {run_dir} is in use by {owner}: two runs would overwrite each "
            f"other's metrics and checkpoints.\n"
            f"Wait for it to end, or name another directory."
        ) from None
    except OSError as error:  # some network file systems know no locks
        log.warning("%s cannot be locked (%s): see that no other run uses it", run_dir, error)
        return
    with suppress(OSError):  # a full disk: then nobody is told who has it
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def _wait_for(descriptor: int) -> None:
    """Take the lock; children of a run that was killed may have it for some seconds more.

    Raises:
        BlockingIOError: somebody has it for good.
        OSError: the file system knows no locks.
    """
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)
