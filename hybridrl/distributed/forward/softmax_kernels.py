"""Triton kernels of log_probs.py: one pass over the logits in each direction.

Forward has one program per row, with a running maximum m. Relative to m it keeps running sums
s = sum exp(x - m) and t = sum exp(x - m) x. At the end log Z = m + log s, H = log Z - t / s.
Backward is elementwise. Both work in float32 on logits of any dtype.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
META = {"BLOCK": BLOCK, "num_warps": 8}


def softmax_rows(
    logits: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log p[target], log Z and entropy of each row; see log_probs.py.

    Rows may lie apart.
    """
    num_rows, vocab = logits.shape
    assert logits.stride(1) == 1
    log_probs, log_z, entropy = logits.new_empty(3, num_rows, dtype=torch.float32)
    if num_rows:
        _forward[(num_rows,)](
            logits,
            logits.stride(0),
            targets,
            log_probs,
            log_z,
            entropy,
            vocab,
            1.0 / temperature,
            **META,
        )
    return log_probs, log_z, entropy


def logits_gradient_(
    logits: Tensor,
    targets: Tensor,
    log_z: Tensor,
    entropy: Tensor,
    grad_log_probs: Tensor,
    grad_entropy: Tensor | None,
    temperature: float,
) -> Tensor:
    """Overwrite the logits with their gradient; see log_probs.py."""
    num_rows, vocab = logits.shape
    assert logits.is_contiguous()
    if num_rows:
        _backward[(num_rows, triton.cdiv(vocab, BLOCK))](
            logits,
            targets,
            log_z,
            entropy,
            grad_log_probs.contiguous(),
            grad_log_probs if grad_entropy is None else grad_entropy.contiguous(),
            vocab,
            1.0 / temperature,
            WITH_ENTROPY=grad_entropy is not None,
            **META,
        )
    return logits


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    logits,
    stride,
    targets,
    log_probs,
    log_z,
    entropy,
    vocab,
    inverse_temperature,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    largest = tl.full((), -float("inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    weighted = tl.zeros((), tl.float32)
    for first in range(0, vocab, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < vocab
        x = tl.load(start + columns, mask=inside, other=0.0).to(tl.float32) * inverse_temperature
        larger = tl.maximum(largest, tl.max(tl.where(inside, x, -float("inf")), 0))
        e = tl.where(inside & (x > -float("inf")), tl.exp(x - larger), 0.0)
        shrink = tl.where(largest == larger, 1.0, tl.exp(largest - larger))  # both may be -inf
        total = total * shrink + tl.sum(e, 0)
        weighted = weighted * shrink + tl.sum(tl.where(e > 0, e * x, 0.0), 0)
        largest = larger
    z = largest + tl.log(total)
    target = tl.load(targets + row)
    x_target = tl.load(start + target).to(tl.float32) * inverse_temperature
    tl.store(log_probs + row, x_target - z)
    tl.store(log_z + row, z)
    tl.store(entropy + row, z - weighted / total)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    logits,
    targets,
    log_z,
    entropy,
    grad_log_probs,
    grad_entropy,
    vocab,
    inverse_temperature,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab
    place = logits + row * vocab + columns
    x = tl.load(place, mask=inside, other=0.0).to(tl.float32) * inverse_temperature
    log_p = x - tl.load(log_z + row)
    p = tl.exp(log_p)
    of_log_prob = tl.load(grad_log_probs + row)
    gradient = -p * of_log_prob
    if WITH_ENTROPY:
        gradient -= tl.load(grad_entropy + row) * p * (log_p + tl.load(entropy + row))
    gradient += tl.where(columns == tl.load(targets + row), of_log_prob, 0.0)
    tl.store(place, (gradient * inverse_temperature).to(logits.dtype.element_ty), mask=inside)
