"""Chunked log-probs and entropies against the full softmax: values, gradients, memory."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hybridrl.distributed.log_probs import Entropy, token_log_probs

TOKENS, HIDDEN, VOCAB, TEMPERATURE = 23, 8, 101, 0.7
GENERATOR = torch.Generator().manual_seed(0)
STATES = torch.randn(TOKENS, HIDDEN, generator=GENERATOR)
TARGETS = torch.randint(0, VOCAB, (TOKENS,), generator=GENERATOR)
WEIGHTS = torch.randn(2, TOKENS, generator=GENERATOR)


def new_head():
    torch.manual_seed(1)
    return nn.Linear(HIDDEN, VOCAB, bias=False)


def chunked(head, states, chunk_tokens, entropy):
    return token_log_probs(
        states, TARGETS, head, temperature=TEMPERATURE, chunk_tokens=chunk_tokens, entropy=entropy
    )


def full(head, states):
    log_p = (head(states) / TEMPERATURE).log_softmax(-1)
    return log_p.gather(-1, TARGETS[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 23, 100])
def test_values_and_gradients_of_the_full_softmax(chunk_tokens):
    found, wanted = [], []
    for results, compute in ((found, "chunked"), (wanted, "full")):
        head, states = new_head(), STATES.clone().requires_grad_()
        if compute == "chunked":
            log_probs, entropy = chunked(head, states, chunk_tokens, Entropy.differentiate)
        else:
            log_probs, entropy = full(head, states)
        (WEIGHTS[0] * log_probs + WEIGHTS[1] * entropy).sum().backward()
        results += [log_probs, entropy, states.grad, head.weight.grad]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_uniform_distribution_has_closed_forms():
    """Equal logits: log p = -log V and H = log V for every token."""
    log_probs, entropy = token_log_probs(
        STATES,
        TARGETS,
        lambda states: torch.zeros(len(states), VOCAB),
        temperature=1.0,
        chunk_tokens=4,
        entropy=Entropy.report,
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
    empty = token_log_probs(
        STATES[:0],
        TARGETS[:0],
        new_head(),
        temperature=1.0,
        chunk_tokens=5,
        entropy=Entropy.report,
    )
    assert empty.log_probs.shape == (0,) and empty.log_probs.requires_grad


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
        log_probs, entropy = chunked(head, states, 9, Entropy.differentiate)
        (log_probs + entropy).sum().backward()
    assert largest.elements == 9 * VOCAB
    with LargestResult() as largest:
        log_probs, entropy = full(head, states)
        (log_probs + entropy).sum().backward()
    assert largest.elements == TOKENS * VOCAB
