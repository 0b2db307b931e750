"""Operators of exact.py, opaque to torch.compile, and their gradients.

Each gives a token the same bits in any batch.

Shapes:  N = tokens   H, K = query, key heads   D = head size
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hybridrl.distributed.torch_compat import varlen_backward

# Version of vLLM's FlashAttention.
FLASH_ATTENTION = 3
# vLLM's logits are rows of a multiple of this.
ROW = 64
# Logits that are copied to float32 at one time.
COPIED_ROWS = 256


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


def most_queries(longest: int, head_size: int) -> int:
    """Return the length of queries that FlashAttention 3 is told, which chooses its tiles.

    For heads of 64 it adds up 64 rows or less, as of decoding, in another order.
    """
    return max(longest, 65) if head_size <= 64 else longest


@torch.library.custom_op("hybridrl::attention", mutates_args=())
def attention(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute causal attention within packed sequences as vLLM does.

    Args:
        q: [N, H, D]; k and v are [N, K, D].
        bounds: [B + 1] int32, first token of each sequence.
        longest: tokens of the longest sequence.
        scale: factor on the scores.

    Returns:
        [N, H, D], and the log-sum-exp of the scores, [H, N] float32.
    """
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    output, log_sum_exp, *_ = flash_attn_varlen_func(
        q,
        k,
        v,
        max_seqlen_q=most_queries(longest, q.shape[-1]),
        cu_seqlens_q=bounds,
        max_seqlen_k=longest,
        cu_seqlens_k=bounds,
        softmax_scale=scale,
        causal=True,
        return_softmax_lse=True,
        fa_version=FLASH_ATTENTION,
        num_splits=1,
    )
    return output, log_sum_exp


@attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor]:
    log_sum_exp = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    return torch.empty_like(q, memory_format=torch.contiguous_format), log_sum_exp


def _attention_context(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.longest, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _attention_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    q, k, v, bounds, output, log_sum_exp = ctx.saved_tensors
    whole = (bounds, ctx.longest) * 2
    grads = varlen_backward(grad, (q, k, v), output, log_sum_exp, whole, ctx.scale)
    return *grads, None, None, None


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


def token_log_probs(
    logits: Tensor, targets: Tensor, temperature: float, *, is_cut: bool = False
) -> Tensor:
    """Compute log-probs of `targets` from logits [C, V] by vLLM's kernels, [C] float32, nats.

    `is_cut` says that sampling kept some tokens alone, and so worked on float32 logits.
    """
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

    vocab = logits.shape[1]
    if vocab % ROW:  # the kernel adds up rows at such a distance in another order
        logits = F.pad(logits, (0, -vocab % ROW))[:, :vocab]
    if temperature == 1.0 and not is_cut:
        return compute_token_logprobs(logits, targets[:, None])[:, 0]
    log_probs = []
    for part, ids in zip(logits.split(COPIED_ROWS), targets.split(COPIED_ROWS), strict=True):
        divided = part.float()  # as vLLM: a float32 copy, divided in place
        rows = torch.zeros(len(part), dtype=torch.int32, device=part.device)
        apply_temperature(divided, rows, rows.new_full((1,), temperature, dtype=torch.float32))
        log_probs.append(compute_token_logprobs(divided, ids[:, None])[:, 0])
    return torch.cat(log_probs)
