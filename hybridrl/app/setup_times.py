"""Timing of the setup, from the start of the program to its first step."""

import time
from collections.abc import Mapping

import psutil

# Shorter parts are not shown.
MIN_SHOWN_S = 0.05


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


def program_start() -> float:
    """Return the start of this process, in seconds since the epoch."""
    return psutil.Process().create_time()
