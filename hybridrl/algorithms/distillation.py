"""On-policy distillation by the sampled tokens: the teacher's log-probs as advantages."""

import torch
from torch import Tensor

from hybridrl.algorithms.masked import (
    at_least_float32,
    check_coef,
    check_masked,
    check_same_shape,
    masked_sum,
)
from hybridrl.algorithms.token_loss import TokenLoss


def distillation_advantages(
    advantages: Tensor,
    teacher_log_probs: Tensor,
    old_log_probs: Tensor,
    *,
    reward_coef: float,
    coef: float,
) -> Tensor:
    """Compute advantages with the teacher's: A'_t = reward_coef A_t + coef (log q_t - log p_t).

    q_t and p_t are the probabilities of the sampled token. For tokens sampled from p, the expected
    gradient of the second term is -coef grad KL(p||q) at each token given its prefix. A token's
    effect on the KL of later tokens does not count, as in Thinking Machines' recipe. MiniLLM adds
    the rest of the response to each token.

    Args:
        advantages: A_t of the rewards, any shape.
        teacher_log_probs: log q_t at the rollout's temperature, nats, the same shape.
        old_log_probs: log p_t of the policy before this step's updates, the same shape.
        reward_coef: weight of the rewards, >= 0; 0 is distillation alone.
        coef: weight of the teacher, >= 0, in the advantages' unit per nat.

    Returns:
        Advantages of that shape, float32 (float64 for float64 input); exactly reward_coef A_t
        where teacher and policy agree.

    Source: Gu et al. 2024 (MiniLLM), https://arxiv.org/abs/2306.08543; Agarwal et al. 2024 (GKD),
        https://arxiv.org/abs/2306.13649; Lu and Thinking Machines Lab 2025,
        https://thinkingmachines.ai/blog/on-policy-distillation
    """
    log_probs = {"teacher_log_probs": teacher_log_probs, "old_log_probs": old_log_probs}
    check_same_shape("distillation_advantages", advantages=advantages, **log_probs)
    check_coef("distillation_advantages", reward_coef)
    check_coef("distillation_advantages", coef)
    difference = at_least_float32(teacher_log_probs) - at_least_float32(old_log_probs)
    return reward_coef * at_least_float32(advantages) + coef * difference


def divergence_loss(divergence: Tensor, response_mask: Tensor, *, coef: float) -> TokenLoss:
    """Compute the divergence from the teacher as a loss term: l_t = coef * D_t.

    `divergence` is D_t, [N] with graph, nats (distributed/forward/divergence.py).
    The metric `teacher_divergence` is without the weight `coef`, which is >= 0.
    """
    check_masked("divergence_loss", response_mask, divergence=divergence)
    check_coef("divergence_loss", coef)
    values = divergence.masked_fill(~response_mask, 0.0)
    return TokenLoss(
        coef * values, {"teacher_divergence": masked_sum(values.detach(), response_mask)}
    )


def spread(
    student_log_probs: Tensor,
    teacher_log_probs: Tensor,
    student_counts: Tensor,
    teacher_counts: Tensor,
) -> Tensor:
    """Spread a teacher's log-probs, of its tokens of a text, over the student's of the same text.

    log q_t = log p_t + (sum_span log q - sum_span log p) / |span|,   |span| in the student's tokens

    Sums over spans and responses are the teacher's. Tokens of a span get equal advantages, as
    nothing says which of them the teacher would have changed.

    Args:
        student_log_probs: [S] log p_t of the tokens of a response, nats.
        teacher_log_probs: [T] of the teacher's tokens of the same text.
        student_counts, teacher_counts: [K] int64, tokens in each span, which follow each other from
            the first (data/sources/alignment.py); all teacher's tokens are in spans.

    Returns:
        [S] float32; log p_t of tokens in no span, where the teacher adds nothing.
    """
    of_student, of_teacher = map(torch.repeat_interleave, (student_counts, teacher_counts))
    values = at_least_float32(student_log_probs).clone()
    aligned = values[: len(of_student)]
    difference = values.new_zeros(len(student_counts))
    difference.index_add_(0, of_teacher, at_least_float32(teacher_log_probs))
    difference.index_add_(0, of_student, aligned, alpha=-1)
    aligned += (difference / student_counts)[of_student]
    return values
