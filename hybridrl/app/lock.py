"""Lock of a run's directory."""

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
# Seconds to wait for the lock.
LOCK_S = 5.0


@contextmanager
def exclusive_run(run_dir: Path) -> Iterator[None]:
    """Lock the directory for this process during the block; its end releases the lock.

    Raises:
        ConfigError: another run has the lock, such as a job that was requeued before its end; or no
            file can be written there.
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
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:  # children of a killed run may hold it for some seconds
            if time.monotonic() > deadline:
                owner = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
                raise ConfigError(
                    f"hydra.run.dir = {run_dir} is in use by {owner or 'a process'}: two runs "
                    f"would overwrite each other's metrics and checkpoints.\n"
                    f"Wait for its end, or set another directory."
                ) from None
        except OSError as error:  # some network file systems have no locks
            log.warning("%s cannot be locked (%s): no other run may use it", run_dir, error)
            return
        time.sleep(0.2)
    with suppress(OSError):  # a full disk: the owner is then unknown
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
