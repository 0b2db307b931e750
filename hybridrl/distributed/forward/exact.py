"""Operations that the trainer and vLLM share, so that log-probs are equal bit for bit.

With rollout.exact the trainer's forward of a token equals vLLM's decoding of it. Each operation
below gives a token the same bits in any batch, and both sides call it:

    RMSNorm, gated activation    one Triton kernel (exact_kernels.py)
    attention                    vLLM's FlashAttention 3; backward from its output and log-sum-exp
    linear layers, head          cuBLAS without split-K; with tensor parallelism a sum of parts
    log-prob of a token          vLLM's kernel

The operators are in exact_ops.py. vllm/exact.py has vLLM's side, docs/numerics.md what equality
costs and does not cover.
"""

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hybridrl.config.planner.families import EXACT
from hybridrl.distributed.forward.exact_ops import add_scaled, gated, linear, rms_norm
from hybridrl.distributed.lora import LoRALinear

# Read by cuBLAS at its start: workspaces too small for split-K, the only part of its products on
# Hopper GPUs that depends on the batch.
PRODUCTS = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
EXACT_ATTENTION = "hybridrl_exact"
# Rows of the products that a probe compares with the first rows of a larger one.
PROBED_ROWS, ALL_ROWS = (1, 2, 8, 24, 64, 256), 2048


def use_fixed_products() -> None:
    """Make cuBLAS sum each product in one order; call before the process's first product."""
    os.environ.update(PRODUCTS)
    matmul: Any = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.preferred_blas_library("cublaslt")


def share_operations(lm: nn.Module, tensor_parallel_size: int) -> None:
    """Replace the norms, MLPs and linear layers of a causal language model by those below.

    A replaced norm or linear layer stays in a tuple, `replaced`, and so no part of the model: its
    class decides the first weights (distributed/weights.py).

    Args:
        lm: of transformers, perhaps with adapters; parameters keep their names.
        tensor_parallel_size: of vLLM, which adds up as many parts of o_proj and down_proj.
    """
    config: Any = lm.config
    config._attn_implementation = EXACT_ATTENTION
    kind = EXACT[config.model_type]
    for name, module in [*lm.named_modules()]:
        if type(module).__name__.endswith("RMSNorm"):
            lm.set_submodule(name, SharedNorm(module, kind))
        elif name.endswith(".mlp"):
            lm.set_submodule(name, SharedMLP(module, gate_kind(config)))
        elif isinstance(module, LoRALinear):
            module.add = add_scaled
        elif isinstance(module, nn.Linear) and ".layers." in f".{name}" and ".lora_" not in name:
            parts = tensor_parallel_size if name.endswith(("o_proj", "down_proj")) else 1
            if parts > 1 or module.bias is not None:
                lm.set_submodule(name, SharedLinear(module, parts))


def gate_kind(config: Any) -> int:
    """Return the kind of a model's MLPs; others than silu and tanh's gelu are a KeyError."""
    name = vars(config).get("hidden_activation") or config.hidden_act
    return {"silu": 0, "gelu_pytorch_tanh": 1}[name]


class SharedNorm(nn.Module):
    """RMSNorm with the weight of another."""

    def __init__(self, norm: nn.Module, kind: int) -> None:
        super().__init__()
        known: Any = vars(norm)
        self.weight, self.replaced = norm.weight, (norm,)
        self.eps = float(known["eps"] if "eps" in known else known["variance_epsilon"])
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        """Normalise rows, [..., H]."""
        return rms_norm(x, self.weight, self.eps, self.kind)


class SharedMLP(nn.Module):
    """Gated MLP with the linear layers of another."""

    def __init__(self, mlp: nn.Module, kind: int) -> None:
        super().__init__()
        for name in ("gate_proj", "up_proj", "gate_up_proj", "down_proj"):
            if name in dict(mlp.named_children()):
                self.add_module(name, mlp.get_submodule(name))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        """Compute down(activation(gate(x)) * up(x)), [..., H]."""
        layers: Any = dict(self.named_children())
        if "gate_up_proj" in layers:
            gate, up = layers["gate_up_proj"](x).chunk(2, -1)
        else:
            gate, up = layers["gate_proj"](x), layers["up_proj"](x)
        return layers["down_proj"](gated(gate, up, self.kind))


class SharedLinear(nn.Module):
    """Linear layer with the weight of another, as a sum of `parts` products."""

    def __init__(self, layer: nn.Linear, parts: int) -> None:
        super().__init__()
        self.weight, self.bias, self.parts = layer.weight, layer.bias, parts
        self.replaced = (layer,)

    def forward(self, x: Tensor) -> Tensor:
        """Compute x W^T + bias, [..., out]."""
        return linear(x, self.weight, self.bias, self.parts)


def uneven_product(lm: nn.Module, device: torch.device) -> str | None:
    """Return the first kind of linear layer whose rows depend on the batch, or None.

    cuBLAS is not invariant on every chip. Rows of small batches are compared with those of a large
    one, for each shape of a weight once.
    """
    seen = set()
    for name, weight in lm.named_parameters():
        shape = tuple(weight.shape)
        if weight.ndim != 2 or shape in seen:
            continue
        seen.add(shape)
        generator = torch.Generator(device).manual_seed(0)
        options: Any = {"generator": generator, "device": device, "dtype": torch.bfloat16}
        factor, states = torch.randn(shape, **options), torch.randn(ALL_ROWS, shape[1], **options)
        whole = F.linear(states, factor)
        for rows in PROBED_ROWS:
            if not torch.equal(F.linear(states[:rows], factor), whole[:rows]):
                kind = name.removesuffix(".weight").rpartition(".")[2]
                return f"{kind} [{shape[0]}, {shape[1]}] with {rows} tokens"
    return None
