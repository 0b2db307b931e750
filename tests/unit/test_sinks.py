"""Attention with sinks is the softmax over scores and one more, which has no value."""

from itertools import pairwise

import pytest
import torch

from hybridrl.distributed.forward import attention
from hybridrl.distributed.forward.sinks import with_sinks

LENGTHS = [5, 1, 37, 70]
BOUNDS = [0, 5, 6, 43, 113]


def reference(q, k, v, sinks, window):
    """Explicit softmax in float64 or float32, of one sequence after the other."""
    outputs = []
    for start, end in pairwise(BOUNDS):
        one, more = q[start:end].transpose(0, 1), q.shape[1] // k.shape[1]
        keys, values = (x[start:end].transpose(0, 1).repeat_interleave(more, 0) for x in (k, v))
        scores = one @ keys.transpose(1, 2) * q.shape[-1] ** -0.5
        ones = torch.ones(end - start, end - start, dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(~(ones.tril() & ones.triu(1 - window)), -torch.inf)
        last = sinks.to(q.dtype)[:, None, None].expand(-1, end - start, 1)
        outputs.append(torch.cat([scores, last], -1).softmax(-1)[..., :-1] @ values)
    return torch.cat(outputs, 1).transpose(0, 1)


def tensors(device, dtype, head_size=64):
    torch.manual_seed(0)
    shapes = (113, 4, head_size), (113, 2, head_size), (113, 2, head_size), (4,)
    return [torch.randn(s).to(device, dtype).requires_grad_() for s in shapes]


def relative(one, other):
    one, other = one.detach().float(), other.detach().float()
    return float((one - other).norm() / other.norm())


def check(attend, device, dtype, window, tolerance, head_size=64):
    inputs = tensors(device, dtype, head_size)
    bounds = torch.tensor(BOUNDS, dtype=torch.int32, device=device)
    output = attend(inputs[:3], (bounds, 70) * 2, None, window, sinks=inputs[3])
    exact = [x.detach().float().requires_grad_() for x in inputs]
    expected = reference(*exact, window or 200)
    weights = torch.randn(expected.shape).to(device)
    grads = torch.autograd.grad((output.float() * weights).sum(), inputs)
    wanted = torch.autograd.grad((expected * weights).sum(), exact)
    assert relative(output, expected) < tolerance
    for one, other in zip(grads, wanted, strict=True):
        assert relative(one, other) < tolerance


@pytest.mark.parametrize("window", [None, 16])
def test_padded(window):
    check(attention._padded, "cpu", torch.float32, window, 1e-5)


def test_padded_computes_the_same_bits_without_gradients():
    """Old log-probs have none, those of the update have: the first ratio is exactly 1."""
    inputs = tensors("cpu", torch.float32)
    arguments = inputs[:3], (torch.tensor(BOUNDS, dtype=torch.int32), 70) * 2, None, 16
    with torch.no_grad():
        expected = attention._padded(*arguments, sinks=inputs[3])
    assert torch.equal(attention._padded(*arguments, sinks=inputs[3]), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("head_size", [64, 80])
@pytest.mark.parametrize("window", [None, 16])
def test_kernel(window, head_size):
    attention.choose_kernel()
    check(with_sinks, "cuda", torch.bfloat16, window, 0.02, head_size)
