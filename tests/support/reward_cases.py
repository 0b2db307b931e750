"""Rewards that misbehave; test_scorer.py runs them in reward processes."""

import json
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


# Ends up in a session of its own, with a parent that has ended.
_DAEMON = "import os; os.fork() and os._exit(0); os.setsid(); os.execv('/bin/sleep', ['x', '600'])"


def leave_child(prompt: str, response: str, example: dict[str, Any]) -> Any:
    """Start a program, hidden or not, leave its id in a file, do what the response says."""
    if example["hides"]:
        subprocess.run([sys.executable, "-c", _DAEMON], env={}, check=True)
    else:
        subprocess.Popen(["sleep", "600"])
    Path(example["file"]).write_text(json.dumps(_sleeping_children()))
    return misbehave(prompt, response, example)


def _sleeping_children() -> list[int]:
    """Programs that sleep below this process or, as orphans, below its supervisor."""
    found = []
    while not found:
        for process in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
                sleeps = b"\0600\0" in (process / "cmdline").read_bytes()
            except OSError:
                continue
            if sleeps and parent in (os.getpid(), os.getppid()):
                found.append(int(process.name))
    return found


def raise_on_line(prompt: str, response: str, example: dict[str, Any]) -> None:
    """Raise on a line of a program that the response names."""
    exec("\n" * int(response) + "raise ValueError('so many')", {})


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


def _leave_group_and_block() -> float:
    os.setpgid(0, os.getpgid(os.getppid()))
    return _ignore_interruptions()


def _return_twice() -> float:
    return 1.0 if os.fork() else 2.0


def _raise_in_copy() -> float:
    if os.fork():
        return 1.0
    raise ValueError("in the copy")


def _write_everywhere(data: bytes, then: Callable[[], Any] = lambda: 1.0) -> Any:
    """Write to every descriptor but the standard ones."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2:
            try:
                os.write(fd, data)
            except OSError:
                continue
    return then()


def _framed(message: Any) -> bytes:
    return json.dumps(message).encode() + b"\n"


class _NoText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


async def _later() -> float:
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


# Sets the clipboard, overwrites its line, and would be shown from right to left.
PAINT = "\x1b]52;c;eA==\x07\rfine\u202e"
LOG_LINE = "[2026-11-28 12:00:00,000][hybridrl][INFO] - all is well"

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
    "float32_inf": lambda: 1e39,
    "overflows_squared": lambda: -1e13,
    "coroutine": lambda: _later(),
    "surrogate": lambda: _raise(ValueError("caf\ud800")),
    "paints": lambda: _raise(ValueError(f"{PAINT}\n{LOG_LINE}{PAINT}")),
    "no_text": lambda: _raise(_NoText()),
    "long_text": lambda: _raise(ValueError("long " * 1_000_000)),
    "forks": _return_twice,
    "fork_raises": _raise_in_copy,
    "leaves_group": _leave_group_and_block,
    "prints": lambda: print("much " * 1_000_000) or 1.0,
    "writes_lines": lambda: _write_everywhere(
        _framed([0, "error", f"x\n{LOG_LINE}", f'{LOG_LINE}\n  File "x"']), _ignore_interruptions
    ),
    "writes_text": lambda: _write_everywhere(b"hello, world"),
    "writes_zeros": lambda: _write_everywhere(bytes(64)),
    "writes_length": lambda: _write_everywhere(b"\xff" * 8),
    "writes_half": lambda: _write_everywhere(bytes(7) + b"\x60", _ignore_interruptions),
    "writes_nesting": lambda: _write_everywhere(b"[" * 20_000 + b"\n"),
    "writes_json": lambda: _write_everywhere(_framed({"index": 0})),
    "writes_ready": lambda: _write_everywhere(_framed([3])),
    "writes_other": lambda: _write_everywhere(_framed([77, [1.0, {}]])),
    "writes_score": lambda: _write_everywhere(_framed([1, [{}, 1]])),
    "writes_failure": lambda: _write_everywhere(_framed([1, "lazy", "", ""])),
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
    "closes": lambda: os.closerange(3, os.sysconf("SC_OPEN_MAX")),
}

NOT_A_FUNCTION = 42
