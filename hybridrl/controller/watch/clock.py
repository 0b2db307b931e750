"""Time by which one process judges others that it looks at again and again."""

import time

from hybridrl.controller.watch.process_snapshot import is_stopped


class WatchClock:
    """Seconds of a watcher, which may have been stopped itself.

    Where a scheduler suspends a whole job, whoever is watched had no chance to get further either:
    a time in which nobody asked for the time counts as `longest_gap_s` at most.

    Args:
        longest_gap_s: more than passes between two looks of a watcher that runs.
    """

    def __init__(self, longest_gap_s: float) -> None:
        self._longest_gap_s = longest_gap_s
        self._asked_at = time.monotonic()
        self._seconds = 0.0

    def now(self) -> float:
        """Seconds since the clock was made."""
        asked_at = time.monotonic()
        self._seconds += min(asked_at - self._asked_at, self._longest_gap_s)
        self._asked_at = asked_at
        return self._seconds


class StoppedTimes:
    """For how long each of some processes of this node has been stopped by a signal."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}

    def seconds(self, pid: int, now: float) -> float:
        """Since it was first seen so; 0 where it is not. `now` is of a `WatchClock`."""
        if not is_stopped(pid):
            self._since.pop(pid, None)
            return 0.0
        return now - self._since.setdefault(pid, now)
