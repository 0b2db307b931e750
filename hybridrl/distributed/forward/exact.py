"""Operations that the trainer and vLLM share, so that log-probs are equal bit for bit.

With rollout.exact the trainer's forward of a token equals vLLM's decoding of it. Each operation
below gives a token the same bits in any batch, and both sides call it:

    RMSNorm, gated activation    one Triton kernel (exact_kernels.py)
    attention                    vLLM's FlashAttention 3; backward from its output and log-sum-exp
    linear layers, head          cuBLAS without split-K; with tensor parallelism a sum of parts
    log-prob of a token          vLLM's kernel

They are custom operators, which torch.compile neither opens nor fuses. vllm_exact.py has vLLM's
side, docs/numerics.md what equality costs and does not cover.

Shapes:  N = tokens   H, K = query, key heads   D = head size
"""

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hybridrl.config.planner.families import FAMILIES, Family
from hybridrl.distributed.lora import LoRALinear

# Read by cuBLAS at its start: workspaces too small for split-K, the only part of its products on
# Hopper GPUs that depends on the batch.
PRODUCTS = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
EXACT_ATTENTION = "hybridrl_exact"
# vLLM's logits are rows of a multiple of this.
ROW = 64
# Rows of the products that a probe compares with the first rows of the last.
PROBED_ROWS = (1, 2, 8, 24, 64, 256, 1024, 8192)


def use_fixed_products() -> None:
    """Make cuBLAS sum each product in one order; call before the process's first product."""
    os.environ.update(PRODUCTS)
    matmul: Any = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.preferred_blas_library("cublaslt")


def norm_weight(family: Family) -> int:
    """Return the kind of a family's norms in exact_kernels.py."""
    if not family.float32_norms:
        return 0
    return 1 if family.norm_weight else 2


def share_operations(lm: nn.Module, tensor_parallel_size: int) -> None:
    """Replace the norms, MLPs and linear layers of a causal language model by those below.

    Args:
        lm: of transformers, perhaps with adapters; parameters keep their names.
        tensor_parallel_size: of vLLM, which adds up as many parts of o_proj and down_proj.
    """
    config: Any = lm.config
    config._attn_implementation = EXACT_ATTENTION
    kind = norm_weight(FAMILIES[config.model_type])
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
        self.weight = norm.weight
        self.eps = float(known["eps"] if "eps" in known else known["variance_epsilon"])
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        """Normalise rows, [..., H]."""
        return rms_norm(x, self.weight, self.eps, self.kind)


class SharedMLP(nn.Module):
    """Gated MLP with the linear layers of another."""

    def __init__(self, mlp: Any, kind: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = mlp.gate_proj, mlp.up_proj
        self.down_proj = mlp.down_proj
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        """Compute down(activation(gate(x)) * up(x)), [..., H]."""
        return self.down_proj(gated(self.gate_proj(x), self.up_proj(x), self.kind))


class SharedLinear(nn.Module):
    """Linear layer with the weight of another, as a sum of `parts` products."""

    def __init__(self, linear: nn.Linear, parts: int) -> None:
        super().__init__()
        self.weight, self.bias, self.parts = linear.weight, linear.bias, parts

    def forward(self, x: Tensor) -> Tensor:
        """Compute x W^T + bias, [..., out]."""
        return linear(x, self.weight, self.bias, self.parts)


@torch.library.custom_op("hybridrl::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float, kind: int) -> Tensor:
    """Normalise the rows of x, [..., H]; for `kind` see exact_kernels.py."""
    from hybridrl.distributed.forward import exact_kernels

    return exact_kernels.rms_norm(x, None, weight, eps, kind)[0]


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float, kind: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _norm_context(ctx: Any, inputs: Any, output: Tensor) -> None:
    x, weight, ctx.eps, ctx.kind = inputs
    ctx.save_for_backward(x, weight)


def _norm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
    x, weight = ctx.saved_tensors
    values, grad32 = x.float(), grad.float()
    scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + ctx.eps)
    normed = values * scale
    inner = grad32 * (weight.float() + (ctx.kind == 2))
    of_x = scale * (inner - normed * (inner * normed).mean(-1, keepdim=True))
    of_weight = None
    if ctx.needs_input_grad[1]:
        of_weight = (grad32 * normed).flatten(0, -2).sum(0).to(weight.dtype)
    return of_x.to(x.dtype), of_weight, None, None


rms_norm.register_autograd(_norm_backward, setup_context=_norm_context)


@torch.library.custom_op("hybridrl::gated", mutates_args=())
def gated(gate: Tensor, up: Tensor, kind: int) -> Tensor:
    """Return activation(gate) * up, [..., F]; for `kind` see exact_kernels.py."""
    from hybridrl.distributed.forward import exact_kernels

    return exact_kernels.gated(gate, up, kind)


@gated.register_fake
def _(gate: Tensor, up: Tensor, kind: int) -> Tensor:
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


def _gated_context(ctx: Any, inputs: Any, output: Tensor) -> None:
    gate, up, ctx.kind = inputs
    ctx.save_for_backward(gate, up)


def _gated_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    gate, up = ctx.saved_tensors
    g, grad32 = gate.float(), grad.float()
    inner = grad32 * up.float()
    if ctx.kind == 0:
        share = torch.sigmoid(g)
        active, of_gate = g * share, inner * share * (1 + g * (1 - share))
    else:
        active = F.gelu(g, approximate="tanh")
        of_gate = torch.ops.aten.gelu_backward(inner, g, approximate="tanh")
    return of_gate.to(gate.dtype), (grad32 * active).to(up.dtype), None


gated.register_autograd(_gated_backward, setup_context=_gated_context)


@torch.library.custom_op("hybridrl::attention", mutates_args=())
def attention(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """Compute causal attention within packed sequences as vLLM does.

    Args:
        q: [N, H, D]; k and v are [N, K, D].
        bounds: [B + 1] int32, first token of each sequence.
        longest: tokens of the longest sequence.
        scale: factor on the scores.
        window: visible tokens, itself included; 0 for all.

    Returns:
        [N, H, D], and the log-sum-exp of the scores, [H, N] float32.
    """
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    output, log_sum_exp, *_ = flash_attn_varlen_func(
        q,
        k,
        v,
        max_seqlen_q=longest,
        cu_seqlens_q=bounds,
        max_seqlen_k=longest,
        cu_seqlens_k=bounds,
        softmax_scale=scale,
        causal=True,
        window_size=[window - 1, 0] if window else None,
        return_softmax_lse=True,
        fa_version=3,
        num_splits=1,
    )
    return output, log_sum_exp


@attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    log_sum_exp = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    return torch.empty_like(q, memory_format=torch.contiguous_format), log_sum_exp


def _attention_context(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.longest, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)


def _attention_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    q, k, v, bounds, output, log_sum_exp = ctx.saved_tensors
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
    grads = torch.ops.torch_attn._varlen_attn_backward(
        grad.contiguous(),
        q,
        k,
        v,
        output,
        log_sum_exp,
        bounds,
        bounds,
        ctx.longest,
        ctx.longest,
        ctx.window == 0,
        no_dropout,
        ctx.scale,
        [ctx.window - 1, 0],
    )
    return *grads, None, None, None, None


attention.register_autograd(_attention_backward, setup_context=_attention_context)


@torch.library.custom_op("hybridrl::linear", mutates_args=())
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, parts: int) -> Tensor:
    """Compute x W^T + bias, [..., out], as tensor-parallel ranks do.

    Each of `parts` slices of the columns gives a rounded product, the first with the bias. They
    are added in float32 in the order of ranks, as by vLLM's all-reduce of a fixed order.
    """
    slices = zip(x.chunk(parts, -1), weight.chunk(parts, -1), strict=True)
    first, *others = (F.linear(part.contiguous(), columns) for part, columns in slices)
    if bias is not None:
        first += bias
    if not others:
        return first
    total = first.float()
    for product in others:
        total += product
    return total.to(x.dtype)


@linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, parts: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _linear_context(ctx: Any, inputs: Any, output: Tensor) -> None:
    x, weight, bias, _ = inputs
    ctx.save_for_backward(x, weight)
    ctx.has_bias = bias is not None


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
    x, weight = ctx.saved_tensors
    rows = grad.flatten(0, -2)
    of_weight = of_bias = None
    if ctx.needs_input_grad[1]:
        of_weight = rows.T @ x.flatten(0, -2)
    if ctx.has_bias and ctx.needs_input_grad[2]:
        of_bias = rows.sum(0)
    return grad @ weight, of_weight, of_bias, None


linear.register_autograd(_linear_backward, setup_context=_linear_context)


@torch.library.custom_op("hybridrl::add_scaled", mutates_args=())
def add_scaled(x: Tensor, update: Tensor, scale: float) -> Tensor:
    """Return x + scale * update, rounded once: a layer's output and that of its adapter."""
    return torch.add(x, update, alpha=scale)


@add_scaled.register_fake
def _(x: Tensor, update: Tensor, scale: float) -> Tensor:
    return torch.empty_like(x)


def _add_context(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.scale = inputs[2]


add_scaled.register_autograd(
    lambda ctx, grad: (grad, grad * ctx.scale, None), setup_context=_add_context
)


def token_log_probs(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Compute log-probs of `targets` from logits [C, V] by vLLM's kernels, [C] float32, nats."""
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

    vocab = logits.shape[1]
    if vocab % ROW:  # the kernel adds up rows at such a distance in another order
        logits = F.pad(logits, (0, -vocab % ROW))[:, :vocab]
    if temperature != 1.0:  # as vLLM: a float32 copy, divided in place
        logits = logits.float()
        rows = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
        apply_temperature(logits, rows, rows.new_full((1,), temperature, dtype=torch.float32))
    return compute_token_logprobs(logits, targets[:, None])[:, 0]


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
        factor, states = torch.randn(shape, **options), torch.randn(8192, shape[1], **options)
        whole = F.linear(states, factor)
        for rows in PROBED_ROWS:
            if not torch.equal(F.linear(states[:rows], factor), whole[:rows]):
                kind = name.removesuffix(".weight").rpartition(".")[2]
                return f"{kind} [{shape[0]}, {shape[1]}] with {rows} tokens"
    return None
