"""Softmax over a vocabulary, row by row: log-probs and entropy forward, gradients backward.

Shapes:  C = rows (tokens of a chunk)   V = vocabulary
Units:   nats

x = logits / temperature, p = softmax(x), log Z = log sum exp x. Logits may be bfloat16; everything
else is float32. On a GPU each direction is one kernel that reads the logits once
(softmax_kernels.py); on a CPU the formulas are plain torch.
"""

from typing import NamedTuple

from torch import Tensor


class Rows(NamedTuple):
    """Result of forward for each row, [C] float32.

    Attributes:
        log_probs: log p[target].
        log_z: log Z, from which backward recomputes p.
        entropy: -sum p log p.
    """

    log_probs: Tensor
    log_z: Tensor
    entropy: Tensor


def softmax_rows(logits: Tensor, targets: Tensor, temperature: float) -> Rows:
    """Compute each row's log-prob of the target, log Z and entropy.

    Args:
        logits: [C, V], contiguous; not changed.
        targets: [C] int64.
        temperature: divides the logits, > 0.
    """
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
    """Overwrite the logits with their gradient.

    d log p[t] / d x_j = [j = t] - p_j          d H / d x_j = -p_j (log p_j + H)

    Args:
        logits: [C, V], contiguous; overwritten.
        targets: [C] int64.
        rows: result of `softmax_rows`.
        grad_log_probs: [C] float32.
        grad_entropy: [C] float32, or None: the entropy has no gradient.
        temperature: as in `softmax_rows`.

    Returns:
        `logits`.
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
