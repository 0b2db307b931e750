"""Log-probs and entropies of tokens, without all logits in float32 at once.

Shapes:  R = response tokens   H = hidden size   V = vocabulary
Units:   nats

[R, V] in float32 is by far the largest tensor of a naive update (16,384 tokens of a 152 k
vocabulary: 10 GB, several times). Here logits exist for one chunk of tokens at a time, in the
compute dtype. Backward recomputes them or, if memory allows, uses kept ones:

    forward    logits = hidden W^T        one pass: log Z, log p, entropy of each row
    backward   logits again, or kept      one pass over them: their gradient, in place
               d hidden = gradient W      d W += gradient^T hidden, in float32
"""

from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridrl.distributed.forward.softmax_rows import Rows, logits_gradient_, softmax_rows


class Entropy(Enum):
    """Use of the entropy of each token's distribution."""

    omit = "omit"
    report = "report"
    differentiate = "differentiate"


class KeptLogits(Enum):
    """Logits kept for backward: none, or all in the compute dtype."""

    none = "none"
    all = "all"


class ResponseLogProbs(NamedTuple):
    """Result of a forward pass for the response tokens.

    Attributes:
        log_probs: [R] float32, log pi of each token.
        entropy: [R] float32, of each token's distribution; None if omitted.
    """

    log_probs: Tensor
    entropy: Tensor | None


def token_log_probs(
    hidden: Tensor,
    targets: Tensor,
    weight: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    entropy: Entropy,
    keep: KeptLogits,
) -> ResponseLogProbs:
    """Compute log-probs of `targets` under softmax(hidden @ weight.T / temperature), in chunks.

    Args:
        hidden: [R, H], states that predict the tokens.
        targets: [R] int64.
        weight: [V, H] of the language-modelling head, in the dtype of `hidden`.
        temperature: divides the logits, > 0.
        chunk_tokens: tokens whose logits are computed at one time.
        entropy: omit it, report it, or return it with gradient.
        keep: logits to keep for backward; float32 logits are never kept.
    """
    if not torch.is_grad_enabled():
        keep = KeptLogits.none  # a Function cannot detect it: its inputs require gradients anyway
    log_probs, entropies = _TokenLogProbs.apply(
        hidden, weight, targets, temperature, chunk_tokens, entropy, keep
    )
    return ResponseLogProbs(log_probs, None if entropy is Entropy.omit else entropies)


class _TokenLogProbs(torch.autograd.Function):
    """(hidden, weight) -> (log-probs, entropies), with both gradients chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk_tokens: int,
        entropy: Entropy,
        keep: KeptLogits,
    ) -> tuple[Tensor, Tensor]:
        parts, kept = [], []
        keeps = keep is KeptLogits.all and hidden.dtype != torch.float32
        for states, ids in zip(
            hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True
        ):
            logits = states @ weight.T
            parts.append(softmax_rows(logits, ids, temperature))
            if keeps:
                kept.append(logits)
            del logits  # before those of the next chunk are allocated
        rows = Rows(*(torch.cat(column) for column in zip(*parts, strict=True)))
        ctx.save_for_backward(hidden, weight, targets, *rows)
        ctx.temperature, ctx.chunk_tokens, ctx.kept = temperature, chunk_tokens, kept
        ctx.differentiates_entropy = entropy is Entropy.differentiate
        if not ctx.differentiates_entropy:
            ctx.mark_non_differentiable(rows.entropy)
        return rows.log_probs, rows.entropy

    @staticmethod
    def backward(
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None, None]:
        hidden, weight, targets, *columns = ctx.saved_tensors
        grad_log_probs, grad_entropy = grads
        if not ctx.differentiates_entropy:
            grad_entropy = None
        kept, ctx.kept = ctx.kept, None
        assert kept is not None, "the logits were overwritten by a first backward"
        grad_hidden = torch.empty_like(hidden)
        grad_weight = None
        for start in range(0, len(hidden), ctx.chunk_tokens):
            part = slice(start, start + ctx.chunk_tokens)
            gradient = logits_gradient_(
                kept.pop(0) if kept else hidden[part] @ weight.T,
                targets[part],
                Rows(*(column[part] for column in columns)),
                grad_log_probs[part],
                None if grad_entropy is None else grad_entropy[part],
                ctx.temperature,
            )
            torch.mm(gradient, weight, out=grad_hidden[part])
            if ctx.needs_input_grad[1]:
                grad_weight = _add_product(grad_weight, gradient, hidden[part], len(hidden))
            del gradient
        if ctx.needs_input_grad[1]:
            # Ranks reduce the same tensors, so there is a gradient even without response tokens.
            grad_weight = torch.zeros_like(weight) if grad_weight is None else grad_weight
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None


def _add_product(total: Tensor | None, gradient: Tensor, states: Tensor, num_tokens: int) -> Tensor:
    """Return total + gradient.T @ states, [V, H], in float32 if there are several chunks.

    Args:
        total: total of the earlier chunks; overwritten.
        gradient: [C, V].
        states: [C, H].
        num_tokens: tokens of all chunks.
    """
    if total is None and (gradient.dtype == torch.float32 or len(states) == num_tokens):
        return gradient.T @ states
    if not gradient.is_cuda:
        product = (gradient.T @ states).float()
        return product if total is None else total.add_(product)
    if total is None:
        return torch.mm(gradient.T, states, out_dtype=torch.float32)
    return torch.addmm(total, gradient.T, states, out_dtype=torch.float32, out=total)
