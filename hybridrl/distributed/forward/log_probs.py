"""Log-probs and entropies of tokens, without all logits in float32 at once.

Shapes:  R = response tokens   C = tokens of a chunk   H = hidden size   V = vocabulary
Units:   nats

[R, V] in float32 is by far the largest tensor of a naive update (16,384 tokens of a 152 k
vocabulary: 10 GB, several times). Here logits exist for one chunk at a time, in the compute dtype:

    forward    logits = hidden W^T        one pass: log Z, log p, entropy of each row
    backward   logits again, or kept      one pass over them: their gradient, in place
               d hidden = gradient W      d W += gradient^T hidden, in float32

With x = logits / temperature, p = softmax(x) and log Z = log sum exp x. Logits may be bfloat16;
everything else is float32. On a GPU each pass is one kernel (softmax_kernels.py).

Where sampling cut the distribution to a set of tokens (rollout.top_p), p is cut to the same set.
Logits of other tokens are set to CUT, so that their p and their gradient are 0. Log-probs, entropy
and gradient are then of the distribution that was sampled from, with the set as a constant.
"""

from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridrl.distributed.forward.exact_ops import token_log_probs as exact_log_probs
from hybridrl.distributed.forward.packing import Kept
from hybridrl.distributed.forward.routing import Routing

# Logit of tokens that sampling did not keep. Finite, as 0 times infinity would be no number.
CUT = -1e30


class Entropy(Enum):
    """Use of the entropy of each token's distribution."""

    omit = "omit"
    report = "report"
    differentiate = "differentiate"


class ResponseLogProbs(NamedTuple):
    """Log pi of each response token, [R] float32, and the entropy of its distribution, if asked.

    `routing` is of models with experts. `states` are those before the head, [R, H] without graph.
    `further` is the number of each token that a target computes, [R] float32.
    """

    log_probs: Tensor
    entropy: Tensor | None
    routing: Routing | None = None
    states: Tensor | None = None
    further: Tensor | None = None


def token_log_probs(
    hidden: Tensor,
    targets: Tensor,
    weight: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    entropy: Entropy,
    keep_logits: bool,
    exact: bool = False,
    kept: Kept | None = None,
    cap: float | None = None,
    banned: Tensor | None = None,
) -> ResponseLogProbs:
    """Compute log-probs of `targets` under softmax(hidden @ weight.T / temperature), in chunks.

    Args:
        hidden, targets: [R, H], states that predict the tokens; [R] int64.
        weight: [V, H] of the language-modelling head, in the dtype of `hidden`.
        keep_logits: keep all logits for backward; float32 logits are never kept.
        exact: compute the log-probs by vLLM's kernel.
        kept: sets of tokens, to which the distributions are cut.
        cap: the products x become cap tanh(x / cap).
        banned: [K] int64, tokens that are never sampled.
    """
    # A Function cannot detect it: its inputs require gradients anyway.
    keeps = keep_logits and torch.is_grad_enabled() and hidden.dtype != torch.float32
    log_probs, entropies = _TokenLogProbs.apply(
        hidden, weight, targets, temperature, chunk_tokens, entropy, keeps, exact, kept, cap, banned
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
        keeps: bool,
        exact: bool,
        kept: Kept | None,
        cap: float | None,
        banned: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        parts, all_logits = [], []
        chunks = zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True)
        for index, (states, ids) in enumerate(chunks):
            logits = ban_(cap_(states @ weight.T, cap), banned)
            logits = cut_(logits, kept, index * chunk_tokens)
            rows = softmax_rows(logits, ids, temperature)
            if exact:
                shared = exact_log_probs(logits, ids, temperature, is_cut=kept is not None)
                rows = rows._replace(log_probs=shared)
            parts.append(rows)
            if keeps:
                all_logits.append(logits)
            del logits  # before those of the next chunk are allocated
        rows = Rows(*(torch.cat(column) for column in zip(*parts, strict=True)))
        ctx.save_for_backward(hidden, weight, targets, *rows)
        ctx.temperature, ctx.chunk_tokens, ctx.kept = temperature, chunk_tokens, kept
        ctx.cap, ctx.banned = cap, banned
        ctx.logits = all_logits
        ctx.differentiates_entropy = entropy is Entropy.differentiate
        if not ctx.differentiates_entropy:
            ctx.mark_non_differentiable(rows.entropy)
        return rows.log_probs, rows.entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, *columns = ctx.saved_tensors
        grad_log_probs, grad_entropy = grads
        if not ctx.differentiates_entropy:
            grad_entropy = None
        all_logits, ctx.logits = ctx.logits, None
        assert all_logits is not None, "the logits were overwritten by a first backward"
        grad_hidden = torch.empty_like(hidden)
        grad_weight = None
        for start in range(0, len(hidden), ctx.chunk_tokens):
            part = slice(start, start + ctx.chunk_tokens)
            if all_logits:
                logits = all_logits.pop(0)
            else:
                logits = ban_(cap_(hidden[part] @ weight.T, ctx.cap), ctx.banned)
                logits = cut_(logits, ctx.kept, start)
            slope = None if ctx.cap is None else 1 - (logits / ctx.cap).clamp_(-1, 1).square_()
            gradient = logits_gradient_(
                logits,
                targets[part],
                Rows(*(column[part] for column in columns)),
                grad_log_probs[part],
                None if grad_entropy is None else grad_entropy[part],
                ctx.temperature,
            )
            if slope is not None:
                gradient.mul_(slope)
            torch.mm(gradient, weight, out=grad_hidden[part])
            if ctx.needs_input_grad[1]:
                grad_weight = add_product(grad_weight, gradient, hidden[part], len(hidden))
            del gradient, logits, slope
        if ctx.needs_input_grad[1]:
            # Ranks reduce the same tensors, so there is a gradient even without response tokens.
            grad_weight = torch.zeros_like(weight) if grad_weight is None else grad_weight
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, *[None] * 9


def add_product(total: Tensor | None, gradient: Tensor, states: Tensor, num_tokens: int) -> Tensor:
    """Return total + gradient.T @ states, [V, H], in float32 if there are several chunks."""
    if total is None and (gradient.dtype == torch.float32 or len(states) == num_tokens):
        return gradient.T @ states
    if not gradient.is_cuda:
        product = (gradient.T @ states).float()
        return product if total is None else total.add_(product)
    if total is None:
        return torch.mm(gradient.T, states, out_dtype=torch.float32)
    return torch.addmm(total, gradient.T, states, out_dtype=torch.float32, out=total)


class Rows(NamedTuple):
    """Result of forward for each row, [C] float32: log p[target], log Z, and -sum p log p."""

    log_probs: Tensor
    log_z: Tensor
    entropy: Tensor


def cap_(logits: Tensor, cap: float | None) -> Tensor:
    """Replace logits x by cap tanh(x / cap), in their dtype, as vLLM does."""
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def ban_(logits: Tensor, banned: Tensor | None) -> Tensor:
    """Set the logits of tokens that are never sampled to CUT."""
    return logits if banned is None else logits.index_fill_(-1, banned, CUT)


def cut_(logits: Tensor, kept: Kept | None, first: int) -> Tensor:
    """Set logits [C, V] outside of the sets of response tokens `first` and following to CUT."""
    if kept is None:
        return logits
    of_chunk = slice(kept.bounds[first], kept.bounds[first + len(logits)])
    places = kept.rows[of_chunk] - first, kept.ids[of_chunk]
    inside = logits[places]
    return logits.fill_(CUT).index_put_(places, inside)


def softmax_rows(logits: Tensor, targets: Tensor, temperature: float) -> Rows:
    """Compute each row's log-prob of the target, log Z and entropy; logits are contiguous."""
    if logits.is_cuda:
        from hybridrl.distributed.forward import softmax_kernels

        return Rows(*softmax_kernels.softmax_rows(logits, targets, temperature))
    x = logits.float().div(temperature)
    log_z = x.logsumexp(dim=-1)
    # Not H = log Z - sum p x: there an error of log Z is multiplied by |x|.
    log_p = x.sub_(log_z[:, None])
    log_probs = log_p.gather(-1, targets[:, None]).squeeze(-1)
    entropy = -log_p.exp().mul_(log_p).sum(-1)
    return Rows(log_probs, log_z, entropy)


def logits_gradient_(
    logits: Tensor,
    targets: Tensor,
    rows: Rows,
    grad_log_probs: Tensor,
    grad_entropy: Tensor | None,
    temperature: float,
) -> Tensor:
    """Overwrite the logits, [C, V] contiguous, with their gradient and return them.

    d log p[t] / d x_j = [j = t] - p_j          d H / d x_j = -p_j (log p_j + H)

    `grad_entropy` is None if the entropy has no gradient.
    """
    if logits.is_cuda:
        from hybridrl.distributed.forward import softmax_kernels

        return softmax_kernels.logits_gradient_(
            logits, targets, rows.log_z, rows.entropy, grad_log_probs, grad_entropy, temperature
        )
    log_p = logits.float().div(temperature).sub_(rows.log_z[:, None])
    p = log_p.exp()
    if grad_entropy is None:
        gradient = p * -grad_log_probs[:, None]
    else:
        of_entropy = log_p.add_(rows.entropy[:, None]).mul_(grad_entropy[:, None])
        gradient = of_entropy.add_(grad_log_probs[:, None]).mul_(p).neg_()
    gradient.scatter_add_(-1, targets[:, None], grad_log_probs[:, None])
    return logits.copy_(gradient.div_(temperature))
