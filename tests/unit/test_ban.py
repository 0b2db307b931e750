"""Tokens that vLLM never samples: logits of -inf, and no others change."""

from types import SimpleNamespace

import pytest
import torch

from hybridrl.rollout.vllm.images import ban

pytestmark = pytest.mark.full


@pytest.mark.parametrize("tokens", [[5], [6, 3, 4], [0, 2, 7], [7, 5, 6, 1, 0]])
def test_only_banned_tokens_lose_their_logits(tokens):
    model = SimpleNamespace(compute_logits=lambda hidden: hidden.clone())
    ban(model, tokens)
    given = torch.randn(3, 8)
    logits = model.compute_logits(given)
    assert (logits[:, tokens] == -torch.inf).all()
    others = [token for token in range(8) if token not in tokens]
    assert torch.equal(logits[:, others], given[:, others])


def test_ranks_without_logits_stay_without():
    model = SimpleNamespace(compute_logits=lambda hidden: None)
    ban(model, [1])
    assert model.compute_logits(torch.zeros(1, 2)) is None
