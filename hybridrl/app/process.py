"""Process of a command: setup, signals, exit codes."""

import fcntl
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybridrl.config.errors import ConfigError
from hybridrl.config.planner.cache import cache_folder
from hybridrl.controller.errors import WorkerError
from hybridrl.controller.signals import Interrupted, preemption_behind, signal_guard

EXIT_FAILED, EXIT_CONFIG, EXIT_PREEMPTED = 1, 2, 75
# Caches of compiled kernels inside hybridrl's cache; workers inherit the variables. torch's default
# is a temporary folder. vLLM's default for Triton is a folder per model, so that kernels without a
# model, those of sampling, would be compiled again for the next model.
KERNEL_FOLDERS = {
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor",
    "TRITON_CACHE_DIR": "triton",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash_attention",
}
# Looks at the number of runnable threads, and seconds between them.
BUSY_SAMPLES, BUSY_PAUSE_S = 5, 0.01


def set_up_process() -> None:
    """Set up kernel caches, memory, threads and imports."""
    for variable, folder in KERNEL_FOLDERS.items():
        os.environ.setdefault(variable, str(cache_folder() / folder))
    # Without locks FlashAttention would wait for one and fail.
    if _has_locks(Path(os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"])):
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    # Large CPU tensors in 2 MiB pages: with 4 KiB pages, allocating a batch takes longer than
    # computing it.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # OpenMP's threads spin while they wait for others. Beside other programs they so take the cores
    # from those that they wait for; on free cores sleeping would cost a tenth of the speed.
    if _is_busy():
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import_from_here()


def _is_busy() -> bool:
    """Return whether other programs compute on half of this machine's cores, or on one of two."""
    runnable = []
    for _ in range(BUSY_SAMPLES):
        runnable.append(int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]))
        time.sleep(BUSY_PAUSE_S)
    return min(runnable) - 1 >= max(1, (os.cpu_count() or 1) // 2)  # this thread is one of them


def _has_locks(folder: Path) -> bool:
    """Return whether files can be made and locked here; some network file systems have no locks."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def import_from_here() -> None:
    """Add the current directory to sys.path, for the user's rewards and workers."""
    if (here := _current_directory()) not in sys.path:  # a console script has its own instead
        sys.path.insert(0, here)


def _current_directory() -> str:
    try:
        here = os.getcwd()
    except FileNotFoundError as error:
        raise ConfigError("The current directory was removed.\nGo to another.") from error
    _check_utf8(here)
    return here


def _check_utf8(*texts: str) -> None:
    """Refuse paths that Ray and safetensors cannot encode."""
    for text in texts:
        if (shown := text.encode(errors="backslashreplace").decode()) != text:
            raise ConfigError(f"{shown}: this is not UTF-8.\nRename the file or folder.")


@contextmanager
def exit_codes() -> Iterator[None]:
    """Exit with a message and a code if the block raises an error below or a signal comes.

    Exit codes: 1 workers failed, 2 the user can fix it, 75 SIGTERM or SIGHUP with a checkpoint
    written, 129 SIGHUP, 130 Ctrl-C, 143 SIGTERM.
    """
    try:
        with signal_guard():
            _current_directory()
            _check_utf8(*sys.argv)
            yield
    except ConfigError as error:
        show_problems(error)
        sys.exit(EXIT_CONFIG)
    except WorkerError as error:  # complete message
        sys.stderr.write(f"{error}\n")
        sys.exit(EXIT_FAILED)
    except Interrupted as error:
        preempted = preemption_behind(error)
        sys.stderr.write(f"{preempted or error}\n")
        has_checkpoint = preempted is not None and preempted.checkpoint is not None
        sys.exit(EXIT_PREEMPTED if has_checkpoint else 128 + error.signum)


def show_problems(error: ConfigError) -> None:
    """Print the problems of a ConfigError."""
    sys.stderr.write(f"{type(error).__name__}: {error}\n")
