"""What the commands beside training have in common: how they end, and what they say then."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

from hybridrl.checkpoint.find import Found, named
from hybridrl.config.errors import ConfigError
from hybridrl.controller.errors import WorkerError
from hybridrl.controller.signals import Interrupted
from hybridrl.models.cache import cache_folder

EXIT_FAILED, EXIT_CONFIG = 1, 2


class UsageError(ConfigError):
    """What is wrong with a command's own arguments."""

    subject = "on the command line"


def run_command(command: Callable[[], None]) -> None:
    """Run a command; leaves by SystemExit unless all goes well.

    Exit codes: 1 failed, 2 what the user can fix, 130 Ctrl-C, 143 SIGTERM.
    """
    signal.signal(signal.SIGTERM, _on_sigterm)
    # As in hybridrl.main: torch's folder for compiled kernels, and the user's modules.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "torchinductor"))
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        command()
    except ConfigError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.exit(EXIT_CONFIG)
    except WorkerError as error:  # tells the whole story itself
        sys.stderr.write(f"{error}\n")
        sys.exit(EXIT_FAILED)
    except KeyboardInterrupt as interrupt:
        signum = interrupt.signum if isinstance(interrupt, Interrupted) else signal.SIGINT
        sys.stderr.write(f"Stopped by {signal.Signals(signum).name}\n")
        sys.exit(128 + signum)


def checkpoint_at(path: Path) -> Found:
    """The checkpoint that a path means, verified; says which newer ones were passed over.

    Args:
        path: a checkpoint's folder, or a run's directory for its newest one that is whole.

    Raises:
        ConfigError: there is none, or the one that was named is damaged.
    """
    try:
        found = named(path, key="PATH")
    except ConfigError as error:
        if type(error) is not ConfigError:  # says what it is about
            raise
        raise UsageError(*error.problems) from error
    for damaged in found.damaged:
        sys.stderr.write(f"passed over, damaged: {damaged}\n")
    return found


def _on_sigterm(signum: int, frame: FrameType | None) -> NoReturn:
    """Leave through every `finally`, as Ctrl-C does."""
    raise Interrupted(signum)
