"""Starts vLLM and says what its start-up consists of."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hybridrl.distributed import position

logger = logging.getLogger(__name__)

# Methods of vLLM's worker that are called once each, and what the log calls their time.
WORKER_PARTS = {
    "init_device": "device",
    "load_model": "model",
    "determine_available_memory": "profiling and compilation",
    "initialize_from_config": "KV cache",
    "compile_or_warm_up_model": "warm-up",
}
# Functions that this calls by the names of its module, once each; on GPUs only. Where one is not
# there, its time is the warm-up's.
WARM_UP_PARTS = {"kernel_warmup": "kernels", "warmup_kernels": "kernels of sampling"}
GRAPHS = "CUDA graphs"
# What a start imports, by device type.
MODULES = {
    "cuda": ("vllm.entrypoints.llm", "vllm.v1.worker.gpu_worker"),
    "cpu": ("vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker"),
}


class StartTimes:
    """Wall seconds of the parts of one start, in the order in which they began."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time inside under `name`, but for parts that begin and end inside."""
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
        """The method, each call of which counts as a part."""

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
    """vLLM's `LLM` in this process, awake, with weights that mean nothing; a collective.

    Args:
        folder: the model in Hugging Face format.
        options: of vLLM's `LLM`.
        times: takes the seconds of each part.
        device_type: "cuda" or "cpu".
        adapt: changes the loaded model before anything is compiled; what it allocates sleeps and
            wakes with the weights.
    """
    with times.part("imports"):
        from vllm import LLM

        worker = _worker_class(device_type)

    load, warm_up = worker.load_model, worker.compile_or_warm_up_model

    def with_adapters(self: Any, **kwargs: Any) -> Any:
        runner = self.model_runner
        load_into_runner = runner.load_model

        def load_and_adapt(**kwargs: Any) -> None:
            load_into_runner(**kwargs)
            adapt(runner.get_model())

        with replaced(runner, {"load_model": load_and_adapt}):
            return load(self, **kwargs)

    def with_graphs_apart(self: Any) -> Any:
        capture = times.counted(self.model_runner.capture_model, GRAPHS)
        with replaced(self.model_runner, {"capture_model": capture}):
            return warm_up(self)

    methods = {name: getattr(worker, name) for name in WORKER_PARTS}
    methods |= {"load_model": with_adapters, "compile_or_warm_up_model": with_graphs_apart}
    counted = {name: times.counted(methods[name], part) for name, part in WORKER_PARTS.items()}
    module = sys.modules[worker.__module__]
    functions = {
        name: times.counted(getattr(module, name), part)
        for name, part in WARM_UP_PARTS.items()
        if name in vars(module)
    }
    with times.part("rest"), replaced(worker, counted), replaced(module, functions):
        return LLM(model=str(folder), **options)


def log_start(times: StartTimes, llm: Any) -> None:
    """Say in this rank's log where the time went."""
    compiling = llm.llm_engine.vllm_config.compilation_config.compilation_time
    logger.info("vLLM started in %s; torch.compile took %.1f s of it", times, compiling)


def _worker_class(device_type: str) -> Any:
    """The class whose instance does vLLM's work in this process."""
    if device_type == "cuda":
        from vllm.v1.worker.gpu_worker import Worker

        return Worker
    from vllm.v1.worker.cpu_worker import CPUWorker

    return CPUWorker


@contextmanager
def replaced(owner: Any, attributes: dict[str, Any]) -> Iterator[None]:
    """Other attributes of a class or an object for a while; inherited ones come back as such."""
    before = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in attributes:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)
