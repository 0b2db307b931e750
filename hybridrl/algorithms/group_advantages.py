"""Advantage estimators that compare the responses to a prompt with each other.

In all of them r_i is the outcome of response i, the sum of its token rewards; where the KL penalty
acts in the reward, that of the whole response is part of it. The advantage A_i stands on every
response token of i. A group is the n responses to one prompt.

Shapes:  B = responses   T = response tokens, right-padded
Units:   rewards share one unit; advantages have it too, where nothing divides by a deviation
Errors:  a group of a single response, and rewards on the mask that are NaN or infinite, are refused
"""

from torch import Tensor

from hybridrl.algorithms.advantages import Estimate, group_wise, whitened
from hybridrl.algorithms.groups import grouped
from hybridrl.algorithms.outcomes import on_every_token, outcomes

# Added to a group's standard deviation before it divides, in the reward's unit.
GROUP_EPS = 1.0e-6


@group_wise
def grpo(rewards: Tensor, response_mask: Tensor, group_id: Tensor) -> Estimate:
    """Group-relative advantages: each response against the others to the same prompt.

    A_i = (r_i - mean_g) / (std_g + GROUP_EPS), where mean_g and std_g (the sample's, over n - 1)
    are those of i's group. A group of equal rewards has advantages 0.

    verl and TRL take the same deviation; TRL adds 1e-4 to it.

    Args:
        rewards: [B, T] per-token reward; usually an outcome on the last token.
        response_mask: [B, T] bool, true on tokens the policy sampled.
        group_id: [B] int, responses of one prompt share it.

    Returns:
        Advantages without unit, 0 off the mask; no returns.

    Raises:
        ValueError: the tensors' shapes do not fit, the mask is not bool, a reward on the mask is
            not finite, or a group has a single response, which nothing can be compared with.

    Source: Shao et al. 2024, section 4.1.2, https://arxiv.org/abs/2402.03300
    """
    outcome = outcomes("grpo", rewards, response_mask)
    groups = grouped("grpo", rewards, group_id)
    centred = groups.centred(outcome)
    std = (groups.sum(centred.square()) / (groups.size - 1)).sqrt()
    return Estimate(on_every_token(centred / (std + GROUP_EPS), rewards, response_mask), None)


@group_wise
def dr_grpo(rewards: Tensor, response_mask: Tensor, group_id: Tensor) -> Estimate:
    """GRPO's advantages without the division by the deviation (Dr. GRPO).

    A_i = r_i - mean_g. Dividing by std_g would weigh up prompts that are nearly solved or nearly
    hopeless. It is (n - 1) / n times `rloo`. The method's other half, a loss that sums over tokens
    and divides by a constant, is the aggregation sequence_sum.

    The same as TRL's scale_rewards=False and verl's norm_adv_by_std_in_grpo=False.

    Args:
        rewards: [B, T] per-token reward; usually an outcome on the last token.
        response_mask: [B, T] bool, true on tokens the policy sampled.
        group_id: [B] int, responses of one prompt share it.

    Returns:
        Advantages in the reward's unit, 0 off the mask; no returns.

    Raises:
        ValueError: the tensors' shapes do not fit, the mask is not bool, a reward on the mask is
            not finite, or a group has a single response.

    Source: Liu et al. 2025, section 3.2, https://arxiv.org/abs/2503.20783
    """
    outcome = outcomes("dr_grpo", rewards, response_mask)
    groups = grouped("dr_grpo", rewards, group_id)
    return Estimate(on_every_token(groups.centred(outcome), rewards, response_mask), None)


@group_wise
def rloo(rewards: Tensor, response_mask: Tensor, group_id: Tensor) -> Estimate:
    """REINFORCE leave-one-out: each response against the mean of the others.

    A_i = r_i - 1 / (n - 1) * sum_{j != i} r_j = n / (n - 1) * (r_i - mean_g)
    The baseline does not depend on response i, so that the gradient stays unbiased.

    The same as verl's and TRL's, except that verl takes r_i itself as the advantage of a single
    response; here that is refused.

    Args:
        rewards: [B, T] per-token reward; the paper's has the KL penalty in it.
        response_mask: [B, T] bool, true on tokens the policy sampled.
        group_id: [B] int, responses of one prompt share it.

    Returns:
        Advantages in the reward's unit, 0 off the mask; no returns.

    Raises:
        ValueError: the tensors' shapes do not fit, the mask is not bool, a reward on the mask is
            not finite, or a group has a single response.

    Source: Ahmadian et al. 2024, the RLOO estimator, https://arxiv.org/abs/2402.14740
    """
    outcome = outcomes("rloo", rewards, response_mask)
    groups = grouped("rloo", rewards, group_id)
    relative = groups.centred(outcome) * groups.size / (groups.size - 1)
    return Estimate(on_every_token(relative, rewards, response_mask), None)


@group_wise
def opo(rewards: Tensor, response_mask: Tensor, group_id: Tensor) -> Estimate:
    """Advantages against the baseline of least gradient variance, weighted by length (OPO).

    A_i = r_i - b_g,   b_g = sum_{j in g} l_j r_j / sum_{j in g} l_j,
    where l_j is the number of response tokens of j. The weights stand for the squared norm of each
    response's gradient, taken as proportional to its length. A response without tokens has no
    weight.

    The same as verl's, except that verl takes 0 as the baseline of a single response; here that is
    refused. The paper trains exactly on-policy, with one update per rollout.

    Args:
        rewards: [B, T] per-token reward; usually an outcome on the last token.
        response_mask: [B, T] bool, true on tokens the policy sampled.
        group_id: [B] int, responses of one prompt share it.

    Returns:
        Advantages in the reward's unit, 0 off the mask; no returns. Over the tokens of a group,
        not over its responses, they sum to 0.

    Raises:
        ValueError: the tensors' shapes do not fit, the mask is not bool, a reward on the mask is
            not finite, or a group has a single response.

    Source: Hao et al. 2025, the simplified optimal baseline, https://arxiv.org/abs/2505.23585
    """
    outcome = outcomes("opo", rewards, response_mask)
    groups = grouped("opo", rewards, group_id)
    lengths = response_mask.sum(1).to(outcome.dtype)
    relative = outcome - groups.maximum(outcome)
    # A group without any token has no advantage to stand anywhere: any divisor will do.
    baseline = groups.sum(lengths * relative) / groups.sum(lengths).clamp(min=1)
    return Estimate(on_every_token(relative - baseline, rewards, response_mask), None)


@whitened
def reinforce_plus_plus_baseline(
    rewards: Tensor, response_mask: Tensor, group_id: Tensor
) -> Estimate:
    """REINFORCE++ with baseline: less the group's mean, then whitened over the batch.

    A'_i = r_i - mean_g,   A_i = (A'_i - mean) / std,
    where mean and std (over N, with 1e-8 added to the variance) are those of A' over the tokens of
    the batch (`whitened`): a long response counts more often than a short one. Responses of a group
    of equal rewards have A' = 0, but A = -mean / std.

    The same as verl's, which takes the variance over N - 1. OpenRLHF subtracts the group's mean
    from the reward alone and then sums per-token KL penalties from each token on; the paper puts
    the KL (k2) in the loss, where there is no difference.

    Args:
        rewards: [B, T] per-token reward; usually an outcome on the last token.
        response_mask: [B, T] bool, true on tokens the policy sampled.
        group_id: [B] int, responses of one prompt share it.

    Returns:
        Advantages without unit, 0 off the mask and 0 throughout if all A' are equal; no returns.

    Raises:
        ValueError: the tensors' shapes do not fit, the mask is not bool, a reward on the mask is
            not finite, or a group has a single response.

    Source: Hu et al. 2025, REINFORCE++ with baseline, https://arxiv.org/abs/2501.03262
    """
    outcome = outcomes("reinforce_plus_plus_baseline", rewards, response_mask)
    groups = grouped("reinforce_plus_plus_baseline", rewards, group_id)
    return Estimate(on_every_token(groups.centred(outcome), rewards, response_mask), None)
