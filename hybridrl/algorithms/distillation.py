"""On-policy distillation by the sampled tokens: the teacher's log-probs as advantages."""

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
