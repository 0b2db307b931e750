"""Wall seconds of the parts of what a rank does, device work included, and which it is in."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hybridrl.distributed import position


class PartTimer:
    """Times parts on this rank; begins when the device has finished what it was given before.

    Attributes:
        seconds: of each part so far, by name.

    Args:
        device: on a GPU each part ends when its kernels have.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, float] = {}
        self._start = self._now()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the seconds of what is inside to those of `name`."""
        said = name.removesuffix("_s").replace("_", " ")
        position.at(said)
        start = self._now()
        yield
        if self._device.type == "cuda":
            position.at(f"device work of {said}")
        self.seconds[name] = self.seconds.get(name, 0.0) + self._now() - start

    def total(self) -> float:
        """Seconds since this timer was made."""
        return self._now() - self._start

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
