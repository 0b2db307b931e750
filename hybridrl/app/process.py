"""The process of a command: what it sets up first, and with which exit code it ends."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from hybridrl.config.errors import ConfigError
from hybridrl.controller.errors import WorkerError
from hybridrl.controller.signals import Interrupted, interrupt_on_termination, preemption_behind
from hybridrl.models.cache import cache_folder

EXIT_FAILED, EXIT_CONFIG, EXIT_PREEMPTED = 1, 2, 75
# Where compiled kernels are kept for the next run, in hybridrl's cache; workers inherit the
# variables. torch would make a folder among the temporary files and leave it behind. Triton would
# put kernels that have nothing to do with a model, those of vLLM's sampling, beside what a first
# start compiles of one model, and compile them again in the next start, which looks elsewhere.
KERNEL_FOLDERS = {"TORCHINDUCTOR_CACHE_DIR": "torchinductor", "TRITON_CACHE_DIR": "triton"}


def set_up_process() -> None:
    """Set up signals, which end the process as Ctrl-C does, kernel caches, memory and imports."""
    interrupt_on_termination()
    for variable, folder in KERNEL_FOLDERS.items():
        os.environ.setdefault(variable, str(cache_folder() / folder))
    # Large CPU tensors in 2 MiB pages: in 4 KiB ones, a batch's fresh memory takes longer than what
    # is computed in it.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    import_from_here()


def import_from_here() -> None:
    """Let the user's rewards and workers be imported from the folder of the command."""
    if os.getcwd() not in sys.path:  # a console script has its own folder there instead
        sys.path.insert(0, os.getcwd())


@contextmanager
def exit_codes() -> Iterator[None]:
    """Leave by SystemExit, and say why, where the block ends by one of the errors below.

    Exit codes: 1 workers failed, 2 what the user can fix, 75 SIGTERM or SIGHUP, and a checkpoint
    was written, 129 SIGHUP, 130 Ctrl-C, 143 SIGTERM.
    """
    try:
        yield
    except ConfigError as error:
        show_problems(error)
        sys.exit(EXIT_CONFIG)
    except WorkerError as error:  # tells the whole story itself
        sys.stderr.write(f"{error}\n")
        sys.exit(EXIT_FAILED)
    except KeyboardInterrupt as error:
        preempted = preemption_behind(error)
        signum = error.signum if isinstance(error, Interrupted) else signal.SIGINT
        name = signal.Signals(preempted.signum if preempted else signum).name
        if preempted is not None and preempted.checkpoint is not None:
            sys.stderr.write(f"Stopped by {name}; the run goes on from {preempted.checkpoint}\n")
            sys.exit(EXIT_PREEMPTED)
        sys.stderr.write(f"Stopped by {name}\n")
        sys.exit(128 + signum)


def show_problems(error: ConfigError) -> None:
    """Say what the user can fix."""
    sys.stderr.write(f"{type(error).__name__}: {error}\n")
