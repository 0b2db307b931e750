"""Profiler of one rank: torch's, over some steps."""

import logging
import time
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

logger = logging.getLogger(__name__)


class RankProfiler:
    """Records operations of this process and its device, from construction to `write`.

    Args:
        on_gpu: also record kernels and copies of the device.
    """

    def __init__(self, on_gpu: bool) -> None:
        device = [ProfilerActivity.CUDA] if on_gpu else []
        self._profile = profile(activities=[ProfilerActivity.CPU, *device])
        self._profile.start()

    def write(self, path: Path) -> None:
        """Stop, and write a Chrome trace, compressed if the name ends in .gz.

        Best effort: a failed write is logged.
        """
        self._profile.stop()
        start = time.perf_counter()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(path))
        except OSError as error:
            logger.warning("%s could not be written: %s", path, error)
            return
        logger.info("wrote %s in %.1f s", path, time.perf_counter() - start)
