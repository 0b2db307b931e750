"""Start of vLLM, with the seconds of its parts."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hybridrl.distributed import position
from hybridrl.rollout import vllm_compat

logger = logging.getLogger(__name__)


class StartTimes:
    """Wall seconds of the parts of one start, in the order in which they began."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time of this context under `name`, without the parts inside it."""
        position.at(name)
        self.seconds.setdefault(name, 0.0)
        before = sum(self.seconds.values())
        start = time.perf_counter()
        try:
            yield
        finally:
            inside = sum(self.seconds.values()) - before
            self.seconds[name] += time.perf_counter() - start - inside

    def counted(self, method: Callable[..., Any], part: str) -> Callable[..., Any]:
        """Return the method, each call of which counts as a part."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.part(part):
                return method(*args, **kwargs)

        return call

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        return f"{sum(self.seconds.values()):.1f} s ({parts})"


def start_vllm(
    folder: Path,
    options: dict[str, Any],
    times: StartTimes,
    device_type: str,
    adapt: Callable[[Any], None],
) -> Any:
    """Start vLLM's `LLM` in this process, awake, with undefined weights; a collective.

    Args:
        folder: the model in Hugging Face format.
        options: arguments of vLLM's `LLM`.
        times: gets the seconds of each part.
        device_type: "cuda" or "cpu".
        adapt: changes the loaded model before anything is compiled. Its allocations sleep and wake
            with the weights.
    """
    with times.part("imports"):
        from vllm import LLM

        vllm_compat.worker_class(device_type)
    with times.part("rest"), vllm_compat.start_hooks(device_type, times.counted, adapt):
        return LLM(model=str(folder), **options)


def log_start(times: StartTimes, llm: Any) -> None:
    """Log the seconds of the parts."""
    compiling = vllm_compat.compile_seconds(llm)
    logger.info("vLLM started in %s; torch.compile took %.1f s of it", times, compiling)
