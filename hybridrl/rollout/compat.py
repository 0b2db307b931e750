"""Everything that depends on how a vLLM version works inside: switches and patches.

Order in a process: `check_installation` (config/checks/installation.py), `set_environment`, then
`import vllm` and its start, inside `cpu_start` where there is no GPU. A patch asserts that what
it replaces is there.
"""

import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F


def set_environment(device_type: str, *, enforce_eager: bool) -> None:
    """Set the switches that vLLM and what it imports read once. Call before `import vllm`.

    The log level stays as the user set it; the rest is not a matter of taste.
    """
    switches = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    late = [name for name, value in switches.items() if os.environ.get(name) != value]
    assert "vllm" not in sys.modules or not late, f"vllm was imported before {late} were set"
    os.environ.update(switches)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if device_type == "cpu" and enforce_eager:
        _disable_compilation()


def _disable_compilation() -> None:
    """Keep vLLM's samplers from compiling kernels on a CPU, which takes longer than it saves."""
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    if "torch._dynamo" in sys.modules:  # it has read the variable already
        torch._dynamo.config.disable = True


@contextmanager
def cpu_start() -> Iterator[None]:
    """Surrounds the construction of vLLM on CPUs; a collective over all ranks.

    - Linear layers keep their weights: packing them for oneDNN would leave empty parameters.
    - Shared memory of tensor parallelism gets a name of its own: vLLM derives it from the
      rendezvous address, which is the same text for all externally launched jobs. The name is
      removed as soon as all ranks have mapped it, so a killed process leaves nothing behind.
    - `torch.set_num_threads` keeps working: vLLM's worker replaces it by a no-op.
    """
    from vllm.model_executor.layers import utils
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    ident = [f"hybridrl-{secrets.token_hex(8)}"]
    dist.broadcast_object_list(ident, src=0)

    def distributed_args(self: Any) -> tuple[str, int, int]:
        # Never dialled, as the process group exists; its last part names the shared memory.
        return f"tcp://127.0.0.1:{ident[0]}", int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])

    _replace(utils, "dispatch_cpu_unquantized_gemm", _keep_weight)
    _replace(ExecutorWithExternalLauncher, "_distributed_args", distributed_args)
    set_num_threads = torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
    dist.barrier()
    for file in Path("/dev/shm").glob(f"*{ident[0]}*"):
        file.unlink(missing_ok=True)


def _keep_weight(layer: Any, remove_weight: bool) -> None:
    """Stands in for vLLM's packing of a linear layer's weight."""
    layer.cpu_linear = F.linear


def asleep_bytes(tag: str) -> int:
    """Device memory that what vLLM has tagged so takes when it wakes."""
    from vllm.device_allocator import get_mem_allocator_instance

    known = get_mem_allocator_instance().pointer_to_data.values()
    sizes = [data.handle[1] for data in known if data.tag == tag]
    assert sizes, f"vLLM has tagged no allocation as {tag}"
    return sum(sizes)


def sleep_by_part(llm: Any) -> None:
    """Have vLLM's level-1 sleep discard the KV cache and leave the weights where they are.

    Raises:
        RuntimeError: this version of vLLM sleeps in another way.
    """
    try:
        from hybridrl.rollout import kv_cache_sleep

        kv_cache_sleep.install(llm)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"rollout.sleep = kv_cache does not fit this version of vllm: {error}. Set "
            "rollout.sleep=all or none, or install the version pinned in requirements/"
        ) from error


def _replace(owner: Any, name: str, new: Any) -> None:
    if name not in vars(owner):
        raise RuntimeError(
            f"hybridrl cannot prepare this version of vllm: {owner.__name__}.{name} is gone. "
            "Install the version pinned in requirements/"
        )
    setattr(owner, name, new)
