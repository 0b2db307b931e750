"""Process of a command: setup and its timing, exit codes."""

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from hybridrl.config.errors import ConfigError
from hybridrl.controller.errors import WorkerError
from hybridrl.controller.signals import Interrupted, interrupt_on_termination, preemption_behind
from hybridrl.models.cache import cache_folder

# Shorter parts of the setup are not shown.
MIN_SHOWN_S = 0.05
EXIT_FAILED, EXIT_CONFIG, EXIT_PREEMPTED = 1, 2, 75
# Caches of compiled kernels inside hybridrl's cache; workers inherit the variables. torch's default
# is a temporary folder. vLLM's default for Triton is a folder per model, so that kernels without a
# model, those of sampling, would be compiled again for the next model.
KERNEL_FOLDERS = {"TORCHINDUCTOR_CACHE_DIR": "torchinductor", "TRITON_CACHE_DIR": "triton"}


def set_up_process() -> None:
    """Set up signals (all end the process as Ctrl-C does), kernel caches, memory and imports."""
    interrupt_on_termination()
    for variable, folder in KERNEL_FOLDERS.items():
        os.environ.setdefault(variable, str(cache_folder() / folder))
    # Large CPU tensors in 2 MiB pages: with 4 KiB pages, allocating a batch takes longer than
    # computing it.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    import_from_here()


def import_from_here() -> None:
    """Add the current directory to sys.path, for the user's rewards and workers."""
    if os.getcwd() not in sys.path:  # a console script has its own folder instead
        sys.path.insert(0, os.getcwd())


@contextmanager
def exit_codes() -> Iterator[None]:
    """Exit with a message and a code if the block raises one of the errors below.

    Exit codes: 1 workers failed, 2 the user can fix it, 75 SIGTERM or SIGHUP with a checkpoint
    written, 129 SIGHUP, 130 Ctrl-C, 143 SIGTERM.
    """
    try:
        yield
    except ConfigError as error:
        show_problems(error)
        sys.exit(EXIT_CONFIG)
    except WorkerError as error:  # complete message
        sys.stderr.write(f"{error}\n")
        sys.exit(EXIT_FAILED)
    except KeyboardInterrupt as error:
        preempted = preemption_behind(error)
        signum = error.signum if isinstance(error, Interrupted) else signal.SIGINT
        name = signal.Signals(preempted.signum if preempted else signum).name
        if preempted is not None and preempted.checkpoint is not None:
            sys.stderr.write(f"Stopped by {name}; resume from {preempted.checkpoint}\n")
            sys.exit(EXIT_PREEMPTED)
        sys.stderr.write(f"Stopped by {name}\n")
        sys.exit(128 + signum)


def show_problems(error: ConfigError) -> None:
    """Print the problems of a ConfigError."""
    sys.stderr.write(f"{type(error).__name__}: {error}\n")


class SetupTimes:
    """Wall seconds of the consecutive parts of the setup since `began` (time.time())."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._last = began
        self._seconds: dict[str, float] = {}

    def mark(self, part: str, inside: Mapping[str, float] | None = None) -> None:
        """End a part that began at the last mark; subtract the seconds of parts `inside` it."""
        now = time.time()
        pieces = dict(inside or {})
        pieces[part] = now - self._last - sum(pieces.values())
        for name, seconds in pieces.items():
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        self._last = now

    def metrics(self) -> dict[str, float]:
        """Return setup/<part>_s, and setup/total_s up to the last mark."""
        parts = {f"setup/{name}_s": seconds for name, seconds in self._seconds.items()}
        return parts | {"setup/total_s": self._last - self._began}

    def __str__(self) -> str:
        parts = [
            f"{name} {seconds:.1f}"
            for name, seconds in self._seconds.items()
            if seconds >= MIN_SHOWN_S
        ]
        return f"{self._last - self._began:.1f} s: {', '.join(parts)}"
