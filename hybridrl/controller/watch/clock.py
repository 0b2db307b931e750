"""Clocks of a process that polls others and may itself be suspended."""

import time

from hybridrl.controller.watch.process_snapshot import is_stopped


class WatchClock:
    """Clock that excludes suspension of this process.

    A scheduler suspends a whole job, so the polled processes make no progress either. Between two
    calls of `now`, at most `longest_gap_s` seconds count: more than between two polls.
    """

    def __init__(self, longest_gap_s: float) -> None:
        self._longest_gap_s = longest_gap_s
        self._asked_at = time.monotonic()
        self._seconds = 0.0

    def now(self) -> float:
        """Return the seconds since creation."""
        asked_at = time.monotonic()
        self._seconds += min(asked_at - self._asked_at, self._longest_gap_s)
        self._asked_at = asked_at
        return self._seconds


class StoppedTimes:
    """Durations for which processes of this node have been stopped by a signal."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}

    def seconds(self, pid: int, now: float) -> float:
        """Return the seconds since a process was first seen stopped, or 0; `now` is a clock's."""
        if not is_stopped(pid):
            self._since.pop(pid, None)
            return 0.0
        return now - self._since.setdefault(pid, now)
