"""vLLM's side of rollout.exact: each token's bits do not depend on its batch.

vLLM's batch-invariant mode fixes attention and all-reduces. Its matrix product in Triton, which
takes a quarter of the speed, gives way to cuBLAS, whose split-K that mode turns off anyway. Norms,
activations and rotations are the trainer's (distributed/forward/exact.py). NAMES are the private
names in use.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from hybridrl.config.errors import ConfigError
from hybridrl.config.planner.families import EXACT
from hybridrl.distributed.forward.exact import (
    PRODUCTS,
    uneven_product,
    use_fixed_products,
)
from hybridrl.distributed.forward.exact_ops import FLASH_ATTENTION, most_queries
from hybridrl.distributed.weights import empty_model

NAMES: tuple[tuple[str, str], ...] = (
    ("vllm.distributed.parallel_state", "get_tp_group"),
    ("vllm.model_executor.custom_op", "CustomOp.forward"),
    ("vllm.model_executor.determinism.batch_invariant", "init_batch_invariance"),
    ("vllm.model_executor.layers.activation", "GeluAndMul SiluAndMul"),
    ("vllm.model_executor.layers.layernorm", "GemmaRMSNorm RMSNorm"),
    ("vllm.model_executor.layers.rotary_embedding.base", "RotaryEmbeddingBase"),
    ("vllm.v1.worker.gpu.sample.gumbel", "apply_temperature"),
    ("vllm.v1.worker.gpu.sample.logprob", "compute_token_logprobs"),
)
# Read at the import of vLLM and the start of cuBLAS.
SWITCHES = PRODUCTS | {
    "VLLM_BATCH_INVARIANT": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_CUSTOM_ALLREDUCE_ALGO": "1stage",
    "VLLM_USE_BREAKABLE_CUDAGRAPH": "0",
}
# Without compilation, whose code rounds otherwise; graphs for steps that only decode.
COMPILATION = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}


@contextmanager
def exact_start() -> Iterator[None]:
    """Keep what vLLM's mode does to the whole process away from the trainer.

    It replaces PyTorch's batched products, softmax and means, of which vLLM's models here need
    none: rotary angles of transformers would be rounded to tf32. It also limits NCCL to one
    channel, which would slow the trainer; vLLM's custom all-reduce adds up ranks without NCCL.
    """
    from vllm.model_executor.determinism import batch_invariant

    with patch.object(batch_invariant, "init_batch_invariance", use_fixed_products):
        yield


def share_operations(model: Any, folder: Path) -> None:
    """Replace products, norms and activations of vLLM's loaded model by those of the trainer.

    Args:
        model: loaded on a GPU.
        folder: its config.json.
    """
    from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
    from vllm.v1.attention.backends import flash_attn

    flash_attn.flash_attn_varlen_func = _attention
    _share_rotation(model, folder)
    kind = EXACT[model.config.model_type]
    for module in model.modules():
        if isinstance(module, RMSNorm | GemmaRMSNorm):
            module._forward_method = partial(_norm, module, kind)
        elif isinstance(module, SiluAndMul | GeluAndMul):
            module._forward_method = partial(_gated, int(isinstance(module, GeluAndMul)))
        elif "quant_method" in vars(module):
            module.quant_method.apply = _product


def check_equality(model: Any, tensor_parallel_size: int) -> None:
    """Raise a ConfigError if something on this GPU keeps vLLM from equality.

    That is an attention other than FlashAttention 3, cuBLAS's products that depend on the batch, or
    an all-reduce of more than two ranks without a fixed order.
    """
    from vllm.distributed.parallel_state import get_tp_group

    problem = uneven_product(model, torch.device("cuda"))
    if problem is not None:
        problem = f"cuBLAS computes {problem} otherwise than with more"
    version = vars(model.model.layers[0].self_attn.attn.impl).get("vllm_flash_attn_version")
    if version != FLASH_ATTENTION:
        problem = f"vLLM runs FlashAttention {version}, and the trainer {FLASH_ATTENTION}"
    if tensor_parallel_size > 2:
        reduce = get_tp_group().device_communicator.ca_comm
        if reduce is None or reduce.disabled:
            problem = "vLLM's custom all-reduce is off, so that NCCL chooses the order of sums"
    if problem:
        raise ConfigError(
            f"rollout.exact = true, but on this GPU {problem}: log-probs of vLLM and the trainer "
            f"would differ.\nSet rollout.exact=false."
        )


def _share_rotation(model: Any, folder: Path) -> None:
    """Fill vLLM's tables of cosines and sines with those of transformers.

    One computes frequencies on a CPU, the other on a GPU. They differ in the last bit, and so do
    cosines at some positions.
    """
    rotary = empty_model(AutoModelForCausalLM, folder).base_model.rotary_emb.cuda()
    of_types = "layer_type" in signature(rotary.forward).parameters
    done = set()
    for index, layer in enumerate(model.model.layers):
        table = dict(layer.self_attn.rotary_emb.named_buffers()).get("cos_sin_cache")
        if table is None:
            raise ConfigError(
                "rollout.exact = true, but the model's rotation depends on a sequence's length "
                "(longrope), which vLLM computes otherwise.\nSet rollout.exact=false."
            )
        if table.data_ptr() in done:  # of layers alike
            continue
        done.add(table.data_ptr())
        positions = torch.arange(len(table), device=table.device)[None]
        states = torch.empty(1, device=table.device, dtype=torch.bfloat16)
        kind = [model.config.layer_types[index]] if of_types else []
        halves = [x[0].chunk(2, -1)[0] for x in rotary(states, positions, *kind)]
        table.copy_(torch.cat(halves, -1))


def _norm(
    module: Any, kind: int, x: Tensor, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    from hybridrl.distributed.forward import exact_kernels

    y, total = exact_kernels.rms_norm(x, residual, module.weight, module.variance_epsilon, kind)
    return y if residual is None else (y, total)


def _attention(*, q: Tensor, max_seqlen_q: int, window_size: Any, **others: Any) -> Any:
    """Run FlashAttention 3 with the tiles of the trainer, without windows: none cuts."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    longest = most_queries(max_seqlen_q, q.shape[-1])
    return flash_attn_varlen_func(q=q, max_seqlen_q=longest, window_size=None, **others)


def _gated(kind: int, x: Tensor) -> Tensor:
    from hybridrl.distributed.forward import exact_kernels

    gate, up = x.chunk(2, -1)
    return exact_kernels.gated(gate, up, kind)


def _product(layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    product = F.linear(x, layer.weight)
    return product if bias is None else product.add_(bias)  # cuBLAS does not always add it alike
