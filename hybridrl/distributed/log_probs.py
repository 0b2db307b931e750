"""Log-probs and entropies of tokens without ever holding all their logits.

Shapes:  R = response tokens   H = hidden size   V = vocabulary
Units:   nats

[R, V] in float32 is by far the largest tensor of a naive update (16,384 tokens of a 152 k
vocabulary: 10 GB, several times over). Here logits live for one chunk of tokens at a time, and
backward recomputes them.
"""

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


class Entropy(Enum):
    """Whether the entropy of each token's distribution is wanted, and what for."""

    omit = "omit"
    report = "report"
    differentiate = "differentiate"


class ResponseLogProbs(NamedTuple):
    """What a forward pass says of the response tokens.

    Attributes:
        log_probs: [R] float32, log pi of each token.
        entropy: [R] float32, of the distribution each was sampled from; None if omitted.
    """

    log_probs: Tensor
    entropy: Tensor | None


def token_log_probs(
    hidden: Tensor,
    targets: Tensor,
    head: Callable[[Tensor], Tensor],
    *,
    temperature: float,
    chunk_tokens: int,
    entropy: Entropy,
) -> ResponseLogProbs:
    """Log-probs of `targets` under softmax(head(hidden) / temperature), chunk by chunk.

    Args:
        hidden: [R, H], the states that predict the tokens.
        targets: [R] int64.
        head: [*, H] -> [*, V], in whatever dtype; the rest is float32.
        temperature: divides the logits, > 0.
        chunk_tokens: tokens whose logits exist at one time.
        entropy: whether to compute it, and with gradient or not.
    """
    parts = [
        checkpoint(
            _chunk_log_probs,
            hidden_chunk,
            target_chunk,
            head,
            temperature,
            entropy,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for hidden_chunk, target_chunk in zip(
            hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True
        )
    ]
    log_probs = torch.cat([part[0] for part in parts])
    if entropy is Entropy.omit:
        return ResponseLogProbs(log_probs, None)
    return ResponseLogProbs(log_probs, torch.cat([part[1] for part in parts]))


def _chunk_log_probs(
    hidden: Tensor,
    targets: Tensor,
    head: Callable[[Tensor], Tensor],
    temperature: float,
    entropy: Entropy,
) -> tuple[Tensor, Tensor | None]:
    logits = head(hidden).float().div_(temperature)
    log_z = logits.logsumexp(dim=-1)
    log_probs = logits.gather(-1, targets[:, None]).squeeze(-1) - log_z
    if entropy is Entropy.omit:
        return log_probs, None
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy is Entropy.differentiate):
        # H = -sum p log p = log Z - sum p * logit
        mean_logit = ((logits - log_z[:, None]).exp() * logits).sum(-1)
        return log_probs, log_z - mean_logit
