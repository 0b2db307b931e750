"""Chunked log-probs and entropies against the full softmax: values, gradients, memory."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hybridrl.distributed.forward.log_probs import Entropy, token_log_probs

TOKENS, HIDDEN, VOCAB, TEMPERATURE = 23, 8, 101, 0.7
GENERATOR = torch.Generator().manual_seed(0)
STATES = torch.randn(TOKENS, HIDDEN, generator=GENERATOR)
TARGETS = torch.randint(0, VOCAB, (TOKENS,), generator=GENERATOR)
WEIGHTS = torch.randn(2, TOKENS, generator=GENERATOR)


def new_head():
    torch.manual_seed(1)
    return nn.Linear(HIDDEN, VOCAB, bias=False)


def chunked(head, states, chunk_tokens, entropy, keep_logits=False, cap=None):
    return token_log_probs(
        states,
        TARGETS,
        head.weight,
        temperature=TEMPERATURE,
        chunk_tokens=chunk_tokens,
        entropy=entropy,
        keep_logits=keep_logits,
        cap=cap,
    )


def full(head, states, cap=None):
    logits = head(states)
    logits = logits if cap is None else cap * (logits / cap).tanh()
    log_p = (logits / TEMPERATURE).log_softmax(-1)
    return log_p.gather(-1, TARGETS[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("cap", [None, 0.5])
@pytest.mark.parametrize("chunk_tokens", [1, 5, 23, 100])
def test_values_and_gradients_of_the_full_softmax(chunk_tokens, cap):
    found, wanted = [], []
    for results, compute in ((found, "chunked"), (wanted, "full")):
        head, states = new_head(), STATES.clone().requires_grad_()
        if compute == "chunked":
            how = {"entropy": Entropy.differentiate, "cap": cap}
            log_probs, entropy, *_ = chunked(head, states, chunk_tokens, **how)
        else:
            log_probs, entropy = full(head, states, cap)
        (WEIGHTS[0] * log_probs + WEIGHTS[1] * entropy).sum().backward()
        results += [log_probs, entropy, states.grad, head.weight.grad]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_uniform_distribution_has_closed_forms():
    """Equal logits: log p = -log V and H = log V for every token."""
    log_probs, entropy, *_ = token_log_probs(
        STATES,
        TARGETS,
        torch.zeros(VOCAB, HIDDEN),
        temperature=1.0,
        chunk_tokens=4,
        entropy=Entropy.report,
        keep_logits=False,
    )
    log_v = torch.tensor(float(VOCAB)).log().expand(TOKENS)
    torch.testing.assert_close(log_probs, -log_v)
    torch.testing.assert_close(entropy, log_v)


def test_reported_entropy_has_no_gradient_and_does_not_touch_the_log_probs():
    head = new_head()
    states = STATES.clone().requires_grad_()
    reported = chunked(head, states, 5, Entropy.report)
    assert reported.entropy is not None and not reported.entropy.requires_grad
    omitted = chunked(head, states, 5, Entropy.omit)
    assert omitted.entropy is None
    assert torch.equal(reported.log_probs, omitted.log_probs)


def test_no_grad_gives_the_same_bits():
    head = new_head()
    with torch.no_grad():
        without = chunked(head, STATES, 5, Entropy.omit).log_probs
    assert torch.equal(without, chunked(head, STATES, 5, Entropy.report).log_probs)


def test_no_response_tokens():
    head = new_head()
    empty = token_log_probs(
        STATES[:0],
        TARGETS[:0],
        head.weight,
        temperature=1.0,
        chunk_tokens=5,
        entropy=Entropy.report,
        keep_logits=False,
    )
    assert empty.log_probs.shape == (0,)
    empty.log_probs.sum().backward()
    assert torch.equal(head.weight.grad, torch.zeros(VOCAB, HIDDEN))


class LargestResult(TorchDispatchMode):
    """Remembers the most elements any operation, forward or backward, has returned."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_all_logits_never_exist_at_one_time():
    states, head = STATES.clone().requires_grad_(), new_head()
    with LargestResult() as largest:
        log_probs, entropy, *_ = chunked(head, states, 9, Entropy.differentiate)
        (log_probs + entropy).sum().backward()
    assert largest.elements == 9 * VOCAB
    with LargestResult() as largest:
        log_probs, entropy = full(head, states)
        (log_probs + entropy).sum().backward()
    assert largest.elements == TOKENS * VOCAB


@pytest.mark.parametrize("entropy", [Entropy.report, Entropy.differentiate])
def test_kept_logits_give_the_gradients_of_recomputed_ones(entropy):
    found = []
    for keep_logits in (False, True):
        states = STATES.to(torch.bfloat16).requires_grad_()
        head = new_head().to(torch.bfloat16)
        result = chunked(head, states, 5, entropy, keep_logits)
        (WEIGHTS[0] * result.log_probs).sum().backward()
        found.append((result.log_probs, states.grad, head.weight.grad))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_chunks_of_bfloat16_add_up_in_float32():
    """The head's gradient is one rounding away from the exact one, however many chunks."""
    states = STATES.to(torch.bfloat16)
    head = new_head().to(torch.bfloat16)
    grads = {}
    for chunk_tokens in (1, TOKENS):
        head.weight.grad = None
        chunked(head, states, chunk_tokens, Entropy.report).log_probs.sum().backward()
        grads[chunk_tokens] = head.weight.grad.float()
    difference = (grads[1] - grads[TOKENS]).norm() / grads[TOKENS].norm()
    assert float(difference) < 2**-8


def test_kept_logits_cannot_be_used_twice():
    states, head = STATES.to(torch.bfloat16).requires_grad_(), new_head().to(torch.bfloat16)
    total = chunked(head, states, 5, Entropy.report, True).log_probs.sum()
    total.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="overwritten"):
        total.backward()
