"""hybridrl: HybridFlow reinforcement learning for language models on FSDP2, Ray and vLLM.

The names below are imported on first use, so that `import hybridrl` takes milliseconds
(docs/python.md).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridrl.api.resharder import Resharder, vllm_in_process
    from hybridrl.api.run import Trainer, train
    from hybridrl.api.service import Service
    from hybridrl.config.errors import ConfigError
    from hybridrl.controller.errors import WorkerError
    from hybridrl.service.data import AdamParams, Datum, Sampling, ServiceError
    from hybridrl.trainer.callbacks import Callback
    from hybridrl.trainer.errors import RunStopped
    from hybridrl.trainer.record import RunResult

__version__ = "0.1.0"

_MODULES = {
    "AdamParams": "hybridrl.service.data",
    "Callback": "hybridrl.trainer.callbacks",
    "ConfigError": "hybridrl.config.errors",
    "Datum": "hybridrl.service.data",
    "Resharder": "hybridrl.api.resharder",
    "RunResult": "hybridrl.trainer.record",
    "RunStopped": "hybridrl.trainer.errors",
    "Sampling": "hybridrl.service.data",
    "Service": "hybridrl.api.service",
    "ServiceError": "hybridrl.service.data",
    "Trainer": "hybridrl.api.run",
    "WorkerError": "hybridrl.controller.errors",
    "train": "hybridrl.api.run",
    "vllm_in_process": "hybridrl.api.resharder",
}
__all__ = [
    "AdamParams",
    "Callback",
    "ConfigError",
    "Datum",
    "Resharder",
    "RunResult",
    "RunStopped",
    "Sampling",
    "Service",
    "ServiceError",
    "Trainer",
    "WorkerError",
    "train",
    "vllm_in_process",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
