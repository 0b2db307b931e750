"""Private and version-dependent names of vLLM: switches, hooks and patches.

The other files of this folder have those of one purpose each.

Order in a process: `check_installation` (config/checks/installation.py), `set_environment`, then
`import vllm` and its start, within `cpu_start` on CPUs. NAMES lists the names in use, which
tests/unit/test_compat.py looks up.
"""

import gc
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel

from hybridrl.config.schema import ModelConfig
from hybridrl.data.sources.tokenizer import load_tokenizer
from hybridrl.distributed.torch_compat import disable_dynamo
from hybridrl.rollout.vllm import exact as vllm_exact
from hybridrl.rollout.vllm import recurrent as vllm_recurrent

# Methods of vLLM's worker that are called once each, and the log's names of their time.
WORKER_PARTS = {
    "init_device": "device",
    "load_model": "model",
    "determine_available_memory": "profiling and compilation",
    "initialize_from_config": "KV cache",
    "compile_or_warm_up_model": "warm-up",
}
_WORKERS = {
    "cuda": ("vllm.v1.worker.gpu_worker", "Worker"),
    "cpu": ("vllm.v1.worker.cpu_worker", "CPUWorker"),
}
# Modules that a start imports, by device type.
MODULES = {device: ("vllm.entrypoints.llm", module) for device, (module, _) in _WORKERS.items()}

# Classes and functions in use, by module. Attributes of instances cannot be listed:
# llm.llm_engine.engine_core.engine_core.scheduler, worker.model_runner, layer.quant_method, and of
# a scheduler's requests.
NAMES: tuple[tuple[str, str], ...] = (
    ("vllm.config", "CompilationConfig.compilation_time CompilationConfig.compute_hash"),
    ("vllm.device_allocator", "get_mem_allocator_instance"),
    ("vllm.device_allocator.cumem", "AllocationData.handle AllocationData.tag"),
    ("vllm.distributed.parallel_state", "get_tp_group GroupCoordinator.cpu_group"),
    ("vllm.entrypoints.openai.chat_completion.protocol", "ChatCompletionRequest"),
    ("vllm.exceptions", "VLLMValidationError"),
    ("vllm.model_executor.layers.linear", "LinearMethodBase.apply"),
    ("vllm.model_executor.layers.mamba.mamba_utils", "is_conv_state_dim_first"),
    ("vllm.model_executor.layers.mamba.ops.cpu.gdn_attention", "cpu_gdn_attention_core"),
    (
        "vllm.model_executor.layers.rotary_embedding",
        "RotaryEmbedding.forward_cpu RotaryEmbedding.forward_native",
    ),
    ("vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm"),
    ("vllm.model_executor.models.registry", "_run_in_subprocess"),
    ("vllm.sampling_params", "StructuredOutputsParams._backend"),
    ("vllm.tool_parsers", "ToolParserManager.get_tool_parser ToolParserManager.list_registered"),
    ("vllm.v1.attention.backends.cpu_attn", "CPUAttentionBackend.get_supported_head_sizes"),
    ("vllm.v1.executor.uniproc_executor", "ExecutorWithExternalLauncher._distributed_args"),
    ("vllm.v1.structured_output", "StructuredOutputManager.grammar_init"),
    ("vllm.v1.structured_output.backend_xgrammar", "validate_xgrammar_grammar"),
    ("vllm.utils.torch_utils", "LayerNameType _resolve_layer_name"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.load_model GPUModelRunner.get_model"),
    *((module, f"{name}.{part}") for module, name in _WORKERS.values() for part in WORKER_PARTS),
)


def set_environment(device_type: str, *, enforce_eager: bool, exact: bool = False) -> None:
    """Set the switches that vLLM and its imports read once. Call before `import vllm`.

    The log level stays as the user set it.
    """
    switches = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    if exact:
        switches |= vllm_exact.SWITCHES
    late = [name for name, value in switches.items() if os.environ.get(name) != value]
    assert "vllm" not in sys.modules or not late, f"vllm was imported before {late} were set"
    os.environ.update(switches)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if device_type == "cpu" and enforce_eager:
        # Compiling kernels of vLLM's samplers costs more time than it saves.
        os.environ["TORCH_COMPILE_DISABLE"] = "1"
        if "torch._dynamo" in sys.modules:  # it has read the variable already
            disable_dynamo()


@contextmanager
def cpu_start() -> Iterator[None]:
    """Prepare the construction of vLLM on CPUs; a collective over all ranks.

    - Linear layers keep their weights: packing them for oneDNN would leave empty parameters.
    - Shared memory of tensor parallelism gets a unique name: vLLM derives it from the rendezvous
      address, which is the same text for all externally launched jobs. The name is removed as soon
      as all ranks have mapped it, so a killed process leaves nothing behind.
    - Gated delta rules are computed in plain torch (vllm/recurrent.py).
    - Queries with a dim of heads (LFM2, latent attention) are rotated in plain torch: vLLM's kernel
      takes them wrong.
    - Models whose file also has classes for images are imported without torchvision.
    - `torch.set_num_threads` keeps working: vLLM's worker replaces it by a no-op.
    """
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    ident = [f"hybridrl-{secrets.token_hex(8)}"]
    dist.broadcast_object_list(ident, src=0)

    def distributed_args(self: Any) -> tuple[str, int, int]:
        # Never dialled, as the process group exists; its last part names the shared memory.
        return f"tcp://127.0.0.1:{ident[0]}", int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])

    kernel = RotaryEmbedding.forward_cpu

    def rotate(self: Any, positions: Any, query: Any, key: Any = None) -> Any:
        run = RotaryEmbedding.forward_native if query.dim() == 3 else kernel
        return run(self, positions, query, key)

    absent = [] if find_spec("torchvision") else ["torchvision.transforms.v2"]
    sys.modules.update({name: MagicMock() for name in absent})
    with (
        patch.object(utils, "dispatch_cpu_unquantized_gemm", _keep_weight),
        patch.object(RotaryEmbedding, "forward_cpu", rotate),
        patch.object(gdn_attention, "cpu_gdn_attention_core", vllm_recurrent.delta_rule()),
        patch.object(ExecutorWithExternalLauncher, "_distributed_args", distributed_args),
        patch.object(torch, "set_num_threads", torch.set_num_threads),
    ):
        yield
    for name in absent:
        sys.modules.pop(name, None)
    dist.barrier()
    for file in Path("/dev/shm").glob(f"*{ident[0]}*"):
        file.unlink(missing_ok=True)


@contextmanager
def own_class(folder: Path) -> Iterator[None]:
    """Give vLLM a transformers class of its own for the model in this folder.

    vLLM runs some architectures through transformers' modules and adds its compilation to their
    class, which the trainer in this process then could not build. Within this context `AutoModel`
    builds a subclass.
    """
    config = type(AutoConfig.from_pretrained(folder, trust_remote_code=False))
    classes = AutoModel._model_mapping
    original = classes[config]
    own = type(original.__name__, (original,), {"__module__": original.__module__})
    with patch.dict(classes._extra_content, {config: own}):
        yield


def _keep_weight(layer: Any, remove_weight: bool) -> None:
    """Replace vLLM's packing of a linear layer's weight."""
    layer.cpu_linear = F.linear


@contextmanager
def start_hooks(
    device_type: str,
    part: Callable[[str], ContextDecorator],
    adapt: Callable[[Any], None],
) -> Iterator[None]:
    """Within this context, vLLM's start counts its parts and adapts the model that it loads.

    Args:
        device_type: "cuda" or "cpu".
        part: counts the time of a context as that of the named part.
        adapt: changes the model that a model runner has loaded.
    """
    worker = worker_class(device_type)
    load = worker.load_model

    def with_adapters(self: Any, **kwargs: Any) -> Any:
        runner = self.model_runner
        load_into_runner = runner.load_model

        def load_and_adapt(**kwargs: Any) -> None:
            load_into_runner(**kwargs)
            adapt(runner)

        with patch.object(runner, "load_model", load_and_adapt):
            return load(self, **kwargs)

    methods = {name: getattr(worker, name) for name in WORKER_PARTS} | {"load_model": with_adapters}
    counted = {name: part(label)(methods[name]) for name, label in WORKER_PARTS.items()}
    with patch.multiple(worker, **counted):
        yield


@contextmanager
def compiled_for_all_batches() -> Iterator[None]:
    """Leave the sizes of CUDA graphs out of the keys of vLLM's compilation cache.

    The compiled code serves all sizes. With them in its key, as in vLLM 0.33, a run with another
    number of responses would compile it again, for a minute.
    """
    from vllm.config import CompilationConfig

    compute_hash = CompilationConfig.compute_hash

    def without_sizes(self: Any) -> str:
        with patch.multiple(self, cudagraph_capture_sizes=None, max_cudagraph_capture_size=None):
            return compute_hash(self)

    with patch.object(CompilationConfig, "compute_hash", without_sizes):
        yield


@contextmanager
def models_inspected_here() -> Iterator[None]:
    """Within this context, vLLM looks at a model's class in this process, which imports it anyway.

    For each new kind of model, vLLM would start another process for this, so that its own would not
    use CUDA yet. That one imports all of vLLM: 6 s on two quick CPU cores, 19 s on slow ones of a
    GPU's host.
    """
    from vllm.model_executor.models import registry

    with patch.object(registry, "_run_in_subprocess", lambda inspect: inspect()):
        yield


def worker_class(device_type: str) -> Any:
    """Import the class of vLLM's worker in this process."""
    module, name = _WORKERS[device_type]
    return getattr(import_module(module), name)


def compile_seconds(llm: Any) -> float:
    """Return the seconds that torch.compile took in the start of an `LLM`."""
    return llm.llm_engine.vllm_config.compilation_config.compilation_time


def tensor_parallel_group() -> dist.ProcessGroup:
    """Return the gloo group of this rank's tensor-parallel ranks."""
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group().cpu_group


def structured_outputs(fields: dict[str, Any]) -> Any:
    """Build vLLM's StructuredOutputsParams for the backend xgrammar."""
    from vllm.sampling_params import StructuredOutputsParams

    params = StructuredOutputsParams(**fields)
    # Set by vLLM's input processor, which the requests of the engine core do not pass.
    params._backend = "xgrammar"
    return params


def enable_grammars(core: Any, model: ModelConfig) -> None:
    """Give an engine core the tokenizer that its grammars need; without images it has none.

    JSON has no whitespace between its parts, of which small models would write without end.
    """
    manager = core.engine_core.structured_output_manager
    manager.vllm_config.structured_outputs_config.disable_any_whitespace = True
    if vars(manager).get("tokenizer") is None:
        manager.tokenizer = load_tokenizer(model)


def asleep_bytes(tag: str) -> int:
    """Return the device memory that allocations with this tag need when they wake."""
    from vllm.device_allocator import get_mem_allocator_instance

    known = get_mem_allocator_instance().pointer_to_data.values()
    sizes = [data.handle[1] for data in known if data.tag == tag]
    assert sizes, f"vLLM has tagged no allocation as {tag}"
    return sum(sizes)


@contextmanager
def keeping_cache() -> Iterator[None]:
    """Keep torch's cached memory, which vLLM 0.33 frees when it wakes, in tenths of a second."""
    with patch.object(gc, "collect"), patch.object(torch.accelerator, "empty_cache"):
        yield
