"""Triton kernels of exact.py: a row's result depends on that row alone, whatever the batch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

GATE_BLOCK = 1024


def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, kind: int
) -> tuple[Tensor, Tensor]:
    """Normalise the rows of x + residual, [..., H]; return that and the rounded sum.

    Without a residual the second result is x. `kind` 0 rounds before the product with the weight,
    1 after it; 2 multiplies by 1 + weight and rounds.
    """
    x = x.contiguous()
    columns = x.shape[-1]
    y = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    block = triton.next_power_of_2(columns)
    if x.numel():
        _norm[(x.numel() // columns,)](
            x,
            x if residual is None else residual.contiguous(),
            weight,
            y,
            total,
            columns,
            eps,
            BLOCK=block,
            ADDS=residual is not None,
            KIND=kind,
            num_warps=min(16, max(1, block // 256)),
        )
    return y, total


def gated(gate: Tensor, up: Tensor, kind: int) -> Tensor:
    """Return activation(gate) * up, [..., F], rounded once; rows may lie apart.

    `kind`: silu (0) or gelu by tanh (1).
    """
    width = gate.shape[-1]
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    gates, ups = gate.reshape(-1, width), up.reshape(-1, width)
    if out.numel():
        _gated[(len(gates), triton.cdiv(width, GATE_BLOCK))](
            gates,
            ups,
            out,
            width,
            gates.stride(0),
            ups.stride(0),
            BLOCK=GATE_BLOCK,
            KIND=kind,
            num_warps=4,
        )
    return out


@triton.jit
def _norm(  # type: ignore[no-untyped-def]
    x, residual, weight, y, total, columns, eps,
    BLOCK: tl.constexpr, ADDS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * columns
    column = tl.arange(0, BLOCK)
    inside = column < columns
    state = tl.load(x + start + column, mask=inside, other=0.0)
    dtype = state.dtype
    if ADDS:
        more = tl.load(residual + start + column, mask=inside, other=0.0)
        state = (state.to(tl.float32) + more.to(tl.float32)).to(dtype)
        tl.store(total + start + column, state, mask=inside)
    values = state.to(tl.float32)
    mean = tl.sum(values * values, 0) / columns
    normed = values * (1.0 / tl.sqrt(mean + eps))
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if KIND == 0:
        normed = normed.to(dtype).to(tl.float32)
    if KIND == 2:
        factor = 1.0 + factor
    tl.store(y + start + column, (normed * factor).to(dtype), mask=inside)


@triton.jit
def _gated(  # type: ignore[no-untyped-def]
    gate, up, out, width, gate_stride, up_stride, BLOCK: tl.constexpr, KIND: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    raw = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0)
    g = raw.to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    if KIND == 0:
        active = g / (1.0 + tl.exp(-g))
    else:  # tanh(z) = 2 sigmoid(2 z) - 1
        z = 0.7978845608028654 * (g + 0.044715 * g * g * g)
        active = g / (1.0 + tl.exp(-2.0 * z))
    tl.store(out + row * width + column, (active * u).to(raw.dtype), mask=inside)
