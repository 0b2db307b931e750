"""Divergence of student and teacher over the vocabulary, without all logits at once.

Shapes:  R = response tokens   C = tokens of a chunk   H, G = hidden sizes of student and teacher
         V, W = rows of their heads, of which the first `vocab` are tokens
Units:   nats

With p = softmax(x) of the student, q of the teacher, and m = beta q + (1 - beta) p:

    kind            value D                               dD / dx_j
    reverse_kl      KL(p||q) = sum p log p/q              p_j (log p_j/q_j - D)
    forward_kl      KL(q||p) = sum q log q/p              p_j - q_j
    jensen_shannon  beta KL(q||m) + (1 - beta) KL(p||m)   (1-beta) p_j (log p_j/m_j - KL(p||m))

beta is the teacher's weight, as in TRL. D / beta tends to KL(q||p) for beta -> 0, and
D / (1 - beta) to KL(p||q) for beta -> 1. TRL's beta = 0 and 1 are these KLs themselves.

With top_k, the k likeliest tokens of one model are compared one by one, and all others as one. The
choice is a constant, and D a lower bound of the whole one.

D and its gradient are exactly 0 where p equals q. Logits exist for one chunk at a time, in the
compute dtype, and again in backward. Distributions are whole, whatever rollout.top_p kept.

Source: Gu et al. 2024 (reverse KL), https://arxiv.org/abs/2306.08543; Agarwal et al. 2024 (GKD,
    generalized Jensen-Shannon), https://arxiv.org/abs/2306.13649
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridrl.config.choices import Divergence, TopOf
from hybridrl.distributed.forward.log_probs import add_product, ban_, cap_


class _Settings(NamedTuple):
    """Those of `divergence`; top_k = vocab if no tokens are merged."""

    kind: Divergence
    beta: float
    top_k: int
    top_of: TopOf
    temperature: float
    chunk_tokens: int
    cap: float | None
    teacher_cap: float | None
    banned: Tensor | None


def divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    kind: Divergence,
    beta: float,
    top_k: int | None,
    top_of: TopOf,
    vocab: int,
    temperature: float,
    chunk_tokens: int,
    cap: float | None = None,
    teacher_cap: float | None = None,
    banned: Tensor | None = None,
) -> Tensor:
    """Compute D of each token, [R] float32, with gradients of `hidden` and `weight`.

    Args:
        hidden, teacher_hidden: [R, H] and [R, G], states that predict the tokens.
        weight, teacher_weight: [V, H] and [W, G] of the heads, in the dtypes of the states.
        beta: in (0, 1); read by jensen_shannon only.
        top_k: None compares all tokens one by one; top_of is then not read.
        vocab: tokens that both models have; rows of the heads after these are padding.
        temperature: divides the logits of both models, after their caps.
        cap, teacher_cap: the products x become cap tanh(x / cap).
        banned: [K] int64, tokens that neither model samples.
    """
    assert 0 < vocab <= min(len(weight), len(teacher_weight)), f"{vocab=} of smaller heads"
    assert kind is not Divergence.jensen_shannon or 0 < beta < 1, f"{beta=} of {kind}"
    top_k = vocab if top_k is None else min(top_k, vocab)
    banned = None if banned is None else banned[banned < vocab]
    settings = _Settings(
        kind, beta, top_k, top_of, temperature, chunk_tokens, cap, teacher_cap, banned
    )
    teacher = teacher_hidden.detach(), teacher_weight.detach()[:vocab]
    # A slice of all rows would still copy the gradient.
    weight = weight if vocab == len(weight) else weight[:vocab]
    values: Tensor = _Divergence.apply(hidden, weight, *teacher, settings)
    return values


class _Divergence(torch.autograd.Function):
    """(hidden, weight) -> D, with both gradients chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        settings: _Settings,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, teacher_hidden, teacher_weight)
        ctx.settings = settings
        size = settings.chunk_tokens
        chunks = zip(hidden.split(size), teacher_hidden.split(size), strict=True)
        return torch.cat(
            [
                _values(
                    _log_softmax(_logits(states, weight, settings.cap, settings.banned), settings),
                    _log_softmax(_of_teacher(others, teacher_weight, settings), settings),
                    settings,
                )
                for states, others in chunks
            ]
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, teacher_hidden, teacher_weight = ctx.saved_tensors
        settings = ctx.settings
        grad_hidden, grad_weight = torch.empty_like(hidden), None
        for start in range(0, len(hidden), settings.chunk_tokens):
            part = slice(start, start + settings.chunk_tokens)
            logits = _logits(hidden[part], weight, settings.cap, settings.banned)
            of_teacher = _of_teacher(teacher_hidden[part], teacher_weight, settings)
            log_q = _log_softmax(of_teacher, settings)
            del of_teacher
            gradient = _gradient_(_log_softmax(logits, settings), log_q, settings)
            gradient.mul_(grads[0][part, None] / settings.temperature)
            if settings.cap is not None:
                gradient.mul_(1 - (logits / settings.cap).clamp_(-1, 1).square_())
            gradient = logits.copy_(gradient)
            torch.mm(gradient, weight, out=grad_hidden[part])
            if ctx.needs_input_grad[1]:
                grad_weight = add_product(grad_weight, gradient, hidden[part], len(hidden))
            del gradient, logits, log_q  # before those of the next chunk are allocated
        if ctx.needs_input_grad[1]:
            # Ranks reduce the same tensors, so there is a gradient even without response tokens.
            grad_weight = torch.zeros_like(weight) if grad_weight is None else grad_weight
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None


def _logits(states: Tensor, weight: Tensor, cap: float | None, banned: Tensor | None) -> Tensor:
    return ban_(cap_(states @ weight.T, cap), banned)


def _of_teacher(states: Tensor, weight: Tensor, settings: _Settings) -> Tensor:
    return _logits(states, weight, settings.teacher_cap, settings.banned)


def _log_softmax(logits: Tensor, settings: _Settings) -> Tensor:
    """Return log-probs, [C, vocab] float32; not `log_softmax`, which would copy once more."""
    x = logits.float().div(settings.temperature)
    return x.sub_(x.logsumexp(-1, keepdim=True))


def _compared(
    log_p: Tensor, log_q: Tensor, settings: _Settings
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return log p and log q, [C, N], of what is compared, and [C, k] ids if others are merged."""
    if settings.top_k == log_p.shape[1]:
        return log_p, log_q, None
    likelier = log_p if settings.top_of is TopOf.student else log_q
    top = likelier.topk(settings.top_k, sorted=False).indices
    return _merged(log_p, top), _merged(log_q, top), top


def _merged(log_p: Tensor, top: Tensor) -> Tensor:
    """Return [C, k + 1], log-probs of the tokens `top`, and of all others together."""
    # Not log(1 - sum of the k): where the others are unlikely, little but rounding would be left.
    others = log_p.scatter(-1, top, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([log_p.gather(-1, top), others], -1)


def _values(log_p: Tensor, log_q: Tensor, settings: _Settings) -> Tensor:
    """Return [C], D of two distributions over the vocabulary."""
    log_p, log_q, _ = _compared(log_p, log_q, settings)
    if settings.kind is Divergence.reverse_kl:
        return _kl(log_p, log_q)
    if settings.kind is Divergence.forward_kl:
        return _kl(log_q, log_p)
    beta = settings.beta
    of_student = _log_ratio_to_mixture(log_p, log_q, beta).mul_(log_p.exp()).sum(-1)
    of_teacher = _log_ratio_to_mixture(log_q, log_p, 1 - beta).mul_(log_q.exp()).sum(-1)
    return beta * of_teacher + (1 - beta) * of_student


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Return [C], KL(a||b), as a sum of terms a log a/b - a + b, which are never negative.

    An error of log Z, about 1e-6, changes it by this factor. Without - a + b it would be added.
    """
    a = log_a.exp()
    return (log_a - log_b).mul_(a).add_(log_b.exp().sub_(a)).sum(-1)


def _log_ratio_to_mixture(log_a: Tensor, log_b: Tensor, weight: float) -> Tensor:
    """Return log a/m for m = weight b + (1 - weight) a; exactly 0 where a = b."""
    difference = log_a - log_b
    # Relative to the larger of a and b: exp of a positive difference might overflow.
    of_smaller = torch.where(difference >= 0, weight, 1 - weight)
    larger_to_m = of_smaller.mul_(difference.abs().neg_().expm1_()).log1p_().neg_()
    return larger_to_m.add_(difference.clamp_(max=0))


def _gradient_(log_p: Tensor, log_q: Tensor, settings: _Settings) -> Tensor:
    """Return [C, vocab], dD / dx; both inputs are overwritten."""
    one, other, top = _compared(log_p, log_q, settings)
    if top is not None:
        shares = log_p.sub_(one[:, -1:]).exp_()  # p of each of the others given one of them
    if settings.kind is Divergence.forward_kl:
        gradient = one.exp_().sub_(other.exp_())
    else:
        if settings.kind is Divergence.reverse_kl:
            terms = one - other
        else:
            terms = _log_ratio_to_mixture(one, other, settings.beta).mul_(1 - settings.beta)
        p = one.exp_()
        total = terms.mul_(p).sum(-1, keepdim=True)
        gradient = terms.sub_(p.mul_(total))
    if top is None:
        return gradient
    return shares.mul_(gradient[:, -1:]).scatter_(-1, top, gradient[:, :-1])
