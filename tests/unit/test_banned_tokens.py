"""Tokens that are never sampled: no probability and no gradient, in log-probs and divergences."""

import pytest
import torch
from torch import nn

from hybridrl.config.choices import Divergence, TopOf
from hybridrl.distributed.forward.divergence import divergence
from hybridrl.distributed.forward.log_probs import Entropy, token_log_probs

BANNED = [3, 17, 100]
TOKENS, HIDDEN, VOCAB = 11, 8, 101
OTHERS = [token for token in range(VOCAB) if token not in BANNED]


def tensors():
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(TOKENS, HIDDEN, generator=generator).requires_grad_()
    weight = nn.Parameter(torch.randn(VOCAB, HIDDEN, generator=generator))
    return states, weight


@pytest.mark.parametrize("cap", [None, 0.5])
def test_log_probs_are_those_of_a_vocabulary_without_them(cap):
    targets = torch.arange(TOKENS) % len(OTHERS)
    results = []
    for is_whole in (True, False):
        states, weight = tensors()
        log_probs, entropy, *_ = token_log_probs(
            states,
            torch.tensor(OTHERS)[targets] if is_whole else targets,
            weight if is_whole else weight[OTHERS],
            temperature=0.7,
            chunk_tokens=4,
            entropy=Entropy.differentiate,
            keep_logits=False,
            cap=cap,
            banned=torch.tensor(BANNED) if is_whole else None,
        )
        (log_probs.sum() + 2 * entropy.sum()).backward()
        results.append((log_probs, entropy, states.grad, weight.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", Divergence)
@pytest.mark.parametrize("top_k", [None, 5])
def test_divergences_are_those_of_a_vocabulary_without_them(kind, top_k):
    results = []
    for is_whole in (True, False):
        states, weight = tensors()
        rows = slice(None) if is_whole else OTHERS
        teacher = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))
        values = divergence(
            states,
            weight[rows],
            states.detach().flip(0),
            teacher[rows],
            kind=kind,
            beta=0.3,
            top_k=top_k,
            top_of=TopOf.student,
            vocab=VOCAB if is_whole else len(OTHERS),
            temperature=0.7,
            chunk_tokens=4,
            banned=torch.tensor(BANNED) if is_whole else None,
        )
        values.sum().backward()
        results.append((values, states.grad, weight.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
