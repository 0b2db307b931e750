"""Rewards that misbehave; test_scorer.py runs them in reward processes."""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any


def length(prompt: str, response: str, example: dict[str, Any], scale: float = 1.0) -> float:
    return scale * len(response)


def own_process_id(prompt: str, response: str, example: dict[str, Any]) -> float:
    time.sleep(0.02)  # long enough for every process to get an item
    return os.getpid()


def heavy_modules(prompt: str, response: str, example: dict[str, Any]) -> float:
    return sum(name in sys.modules for name in ("torch", "ray", "vllm", "transformers", "hydra"))


def record(prompt: str, response: str, example: dict[str, Any]) -> float:
    """Leave a line per call in example["file"], then misbehave as the response says."""
    with Path(example["file"]).open("a") as file:
        file.write(f"{response}\n")
    return misbehave(prompt, response, example)


def leave_child_and_hang(prompt: str, response: str, example: dict[str, Any]) -> float:
    child = subprocess.Popen(["sleep", "600"])
    Path(example["file"]).write_text(str(child.pid))
    return _ignore_interruptions()


def misbehave(prompt: str, response: str, example: dict[str, Any]) -> Any:
    """Do what the response names."""
    kind = response.split()[0]
    return CASES[kind]()


def _raise(error: BaseException) -> None:
    raise error


def _ignore_interruptions() -> float:
    signal.pthread_sigmask(signal.SIG_BLOCK, list(signal.Signals))
    time.sleep(600)
    return 1.0


def _swallow_everything() -> float:
    end = time.monotonic() + 600
    while time.monotonic() < end:
        try:
            time.sleep(600)
        except BaseException:  # the bad manners under test
            continue
    return 1.0


def _take_the_alarm() -> float:
    """Return well, but leave SIGALRM to another handler, as some graders do."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    return 1.0


CASES: dict[str, Callable[[], Any]] = {
    "good": lambda: 1.0,
    "half": lambda: Fraction(1, 2),
    "true": lambda: True,
    "raises": lambda: _raise(ValueError("no such unit: furlong")),
    "exits": lambda: sys.exit(0),
    "interrupts": lambda: _raise(KeyboardInterrupt()),
    "recurses": lambda: CASES["recurses"](),
    "nan": lambda: math.nan,
    "infinite": lambda: math.inf,
    "none": lambda: None,
    "text": lambda: "1.0",
    "decimal": lambda: Decimal(1),
    "huge": lambda: 10**400,
    "sleeps": lambda: time.sleep(600),
    "spins": lambda: [None for _ in iter(int, 1)],
    "swallows": _swallow_everything,
    "blocks": _ignore_interruptions,
    "takes_alarm": _take_the_alarm,
    "dies": lambda: os._exit(3),
    "is_killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "closes": lambda: os.closerange(3, 64),
}

NOT_A_FUNCTION = 42
