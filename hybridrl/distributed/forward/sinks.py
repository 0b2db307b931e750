"""Attention with sinks by a kernel that has none (gpt-oss).

A sink s of a head takes part in the softmax of its scores and has no value:

    p = exp(score - Z'),   Z' = log(exp(Z) + exp(s)),   Z = log sum exp score
    output' = output exp(Z - Z')                        d s = - sum_tokens exp(s - Z') (d . output')

The kernel's backward pass computes p and d . output from the log-sum-exp and the output that it is
given, so that with Z' and output' its gradients are those with the sink. Differentiating the
rescaling instead is wrong: kernels ignore the gradient of Z.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hybridrl.distributed.torch_compat import varlen_backward


def with_sinks(
    qkv: Sequence[Tensor],
    bounds: tuple[Tensor, int, Tensor, int],
    scaling: float | None,
    window: int | None,
    sinks: Tensor,
) -> Tensor:
    """Compute attention of [N, heads, D] within sequences, with sinks [H]; GPUs only.

    `bounds`: first token of each sequence [B + 1] int32, longest length; those of their keys.
    `window`: visible tokens.
    """
    q, k, v = (x.contiguous() for x in qkv)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    return _SinkAttention.apply(q, k, v, sinks, *bounds, scale, window)


class _SinkAttention(torch.autograd.Function):
    """(q, k, v, sinks) -> output."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor,
        starts: Tensor,
        longest: int,
        key_starts: Tensor,
        longest_keys: int,
        scale: float,
        window: int | None,
    ) -> Tensor:
        ctx.longest, ctx.scale, ctx.window = (longest, longest_keys), scale, window
        sides = [-1 if window is None else window - 1, 0]
        options = longest, longest_keys, window is None, scale, sides, True
        output, sums, _ = torch.ops.torch_attn._varlen_attn(q, k, v, starts, key_starts, *options)
        total = torch.logaddexp(sums, sinks.float()[:, None])
        output = (output * (sums - total).exp().T[..., None]).to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, starts, key_starts, output, total)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, starts, key_starts, output, total = ctx.saved_tensors
        grad, bounds = grads[0], (starts, ctx.longest[0], key_starts, ctx.longest[1])
        of_inputs = varlen_backward(grad, (q, k, v), output, total, bounds, ctx.scale, ctx.window)
        share = (sinks.float()[:, None] - total).exp()
        of_sinks = -(share * (grad.float() * output.float()).sum(-1).T).sum(1)
        return *of_inputs, of_sinks.to(sinks.dtype), *[None] * 6
