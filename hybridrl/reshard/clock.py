"""Wall time of work on a device."""

import time

import torch


class DeviceClock:
    """Seconds between points at which the device has done everything."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last = self._now()

    def lap(self) -> float:
        """Seconds since the last call."""
        before, self._last = self._last, self._now()
        return self._last - before

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
