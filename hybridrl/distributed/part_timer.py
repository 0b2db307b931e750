"""Timer of the parts of a phase: wall seconds with device work, published as position."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hybridrl.distributed import position


class PartTimer:
    """Timer of parts on this rank by name, with the device's work; starts after earlier work.

    Args:
        device: the rank's device.
        one_stream: count the work of the current stream alone. Waiting for the whole device would
            break a graph that another thread captures.
    """

    def __init__(self, device: torch.device, *, one_stream: bool = False) -> None:
        self._device, self._one_stream = device, one_stream
        self.seconds: dict[str, float] = {}
        self._start = self._now()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the seconds of this context to those of `name`."""
        label = name.removesuffix("_s").replace("_", " ")
        position.at(label)
        start = self._now()
        yield
        if self._device.type == "cuda":
            position.at(f"device work of {label}")
        self.seconds[name] = self.seconds.get(name, 0.0) + self._now() - start

    def total(self) -> float:
        """Return the seconds since the timer was made."""
        return self._now() - self._start

    def _now(self) -> float:
        if self._device.type == "cuda":
            if self._one_stream:
                torch.cuda.current_stream(self._device).synchronize()
            else:
                torch.cuda.synchronize(self._device)
        return time.perf_counter()
