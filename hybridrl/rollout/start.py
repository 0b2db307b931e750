"""Arguments of vLLM's start by device, and the seconds of its parts."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hybridrl.config.choices import RolloutWeights, SleepMode
from hybridrl.config.planner.multicast import uses_flashinfer_all_reduce
from hybridrl.config.schema import RolloutConfig
from hybridrl.distributed import position
from hybridrl.rollout.vllm.exact import COMPILATION
from hybridrl.rollout.vllm.fp8 import PER_CHANNEL

logger = logging.getLogger(__name__)

# Most and fewest sequences between two sizes of CUDA graphs.
MAX_GRAPH_STEP, MIN_GRAPH_STEP = 64, 8
# A graph is up to a quarter larger than the next smaller one.
STEPS_PER_DOUBLING = 4
# Most tokens of a step with prompts that has a CUDA graph.
MAX_PROMPT_GRAPH = 2048


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

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        return f"{sum(self.seconds.values()):.1f} s ({parts})"


def engine_options(
    config: RolloutConfig, device_type: str, *, recurrent: bool = False
) -> dict[str, Any]:
    """Return the arguments of vLLM's `LLM` except the model's folder.

    With `recurrent` layers vLLM caches prefixes only where it may compute prompts in parts, which
    it does not on CPUs.
    """
    assert config.max_num_seqs is not None
    options: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "generation_config": "vllm",
        "dtype": config.dtype.value,
        "tensor_parallel_size": config.tensor_parallel_size,
        "enable_expert_parallel": config.expert_parallel,
        "distributed_executor_backend": "external_launcher",
        "max_model_len": config.max_prompt_tokens + config.max_response_tokens,
        "max_num_seqs": config.max_num_seqs,
        "enforce_eager": config.enforce_eager,
        "enable_prefix_caching": device_type == "cuda" or not recurrent,
        "logprobs_mode": "processed_logprobs",
        "seed": 0,
    }
    more: dict[str, Any] = {}
    if recurrent:
        options["mamba_ssm_cache_dtype"] = "float32"  # as the trainer's
        more["gdn_prefill_backend"] = "triton"  # FlashInfer's is compiled at its first use
    if config.weights is RolloutWeights.fp8:
        options["quantization"] = PER_CHANNEL
    if config.lora is not None:
        # Part of the key of vLLM's compilation cache, which does not cover the adapters.
        more["adapters"] = [config.lora.rank, config.lora.target_modules]
    if more:
        options["additional_config"] = more
    return options | (_on_gpu(config) if device_type == "cuda" else _on_cpu(config))


def _on_gpu(config: RolloutConfig) -> dict[str, Any]:
    assert config.max_num_seqs is not None
    options: dict[str, Any] = {
        "enable_sleep_mode": config.sleep is not SleepMode.none,
        "gpu_memory_utilization": config.gpu_memory_utilization,
    }
    compilation: dict[str, Any] = dict(COMPILATION) if config.exact else {}
    if config.top_p < 1:
        options["return_sampling_mask"] = True
    if config.kv_cache_mb is not None:
        options["kv_cache_memory_bytes"] = config.kv_cache_mb << 20
    if not config.enforce_eager:
        most = config.max_num_seqs
        sizes = graph_sizes(most) + ([] if config.exact else prompt_graph_sizes(most))
        compilation["cudagraph_capture_sizes"] = sizes
    if config.tensor_parallel_size > 1:
        if not uses_flashinfer_all_reduce():  # the fused one is from FlashInfer, too
            compilation["pass_config"] = {"fuse_allreduce_rms": False}
        if torch.cuda.device_count() < config.tensor_parallel_size:
            logger.warning(
                "vLLM's custom all-reduce is off, which slows generation: this process sees "
                "%d of its engine's %d GPUs",
                torch.cuda.device_count(),
                config.tensor_parallel_size,
            )
            options["disable_custom_all_reduce"] = True
    return options | ({"compilation_config": compilation} if compilation else {})


def _on_cpu(config: RolloutConfig) -> dict[str, Any]:
    assert config.kv_cache_mb is not None, "rollout.kv_cache_mb is needed without a GPU"
    return {
        # Without a fixed size, scheduling and therefore rounding vary from run to run.
        "kv_cache_memory_bytes": config.kv_cache_mb << 20,
        # Seeded sampling dies in a chunked prefill: "CPU Generator does not use offset".
        "enable_chunked_prefill": False,
        # Of latent attention; the other one, for AMX, has no float32. Other models ignore it.
        "attention_backend": "CPU_MLA",
    }


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes of CUDA graphs for decoding in rising order, up to max_num_seqs.

    vLLM's default sizes end at 512 and lie 8 or 16 apart, twice as many as these. A batch is padded
    to the next size. Up to about 200 sequences, decoding on an H200 is bound by memory bandwidth,
    so padding is free.
    """
    sizes, size = [1, 2, 4], 8
    while size < max_num_seqs:
        sizes.append(size)
        doubling = 1 << (size.bit_length() - 1)
        size += min(MAX_GRAPH_STEP, max(MIN_GRAPH_STEP, doubling // STEPS_PER_DOUBLING))
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def prompt_graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the tokens of CUDA graphs for steps that compute prompts while others decode.

    Agents' requests come in one by one. With 256 sequences, such a step takes 13 ms longer than one
    that only decodes, without a graph 30.
    """
    sizes = [factor * max_num_seqs for factor in (2, 4, 8)]
    return [size for size in sizes if size <= MAX_PROMPT_GRAPH]
