"""The advantage estimator of pass@k training: a set of k responses is as good as its best one.

Shapes:  B = responses   T = response tokens, right-padded   G = groups (prompts)
"""

import torch
from torch import Tensor

from hybridrl.algorithms.advantages import Estimate, group_wise
from hybridrl.algorithms.group_advantages import GROUP_EPS
from hybridrl.algorithms.groups import Groups, grouped
from hybridrl.algorithms.outcomes import on_every_token, outcomes


@group_wise
def pass_at_k(rewards: Tensor, response_mask: Tensor, group_id: Tensor, *, pass_k: int) -> Estimate:
    """Pass@k GRPO: every response is judged by the sets of k responses that it belongs to.

    Of the n responses to a prompt, each of the C(n, k) sets S of k is rewarded by its best
    response, R_S = max_{j in S} r_j, and standardised over all sets; a response has the mean
    advantage of the sets that hold it:
        A_i = (mean_{S: i in S} R_S - mean_S R_S) / (std_S R_S + GROUP_EPS),
    with the deviation over all sets (not over one less). r_j is the sum of j's token rewards. The
    three moments are computed in closed form by ranks, without drawing or listing sets. For
    rewards of 0 and 1, with n_neg zeros, it is the paper's analytic form:
        mean_S = 1 - C(n_neg, k) / C(n, k),   std_S = sqrt(mean_S * (1 - mean_S)),
        A_pos = (1 - mean_S) / std_S,
        A_neg = (1 - mean_S - C(n_neg - 1, k - 1) / C(n - 1, k - 1)) / std_S.
    If every set has the same best reward, all advantages are 0. With k = 1 it is GRPO with a
    deviation over n.

    verl's grpo_passk is another method: it rewards the best response alone, by its distance from
    the second best.

    Args:
        rewards: [B, T] per-token reward; usually an outcome on the last token.
        response_mask: [B, T] bool, true on tokens the policy sampled.
        group_id: [B] int, responses of one prompt share it.
        pass_k: k, at least 1; every group needs more responses, or there is one set alone.

    Returns:
        Advantages without unit, 0 off the mask; no returns. Each group's sum is 0.

    Raises:
        ValueError: the tensors' shapes do not fit, the mask is not bool, a reward on the mask is
            not finite, pass_k < 1, or a group has no more than pass_k responses.

    Source: Chen et al. 2025, sections 2.3 (sets, for any rewards) and 2.4 (analytic, for rewards
        of 0 and 1), https://arxiv.org/abs/2508.10751
    """
    if pass_k < 1:
        raise ValueError(f"pass_at_k needs pass_k >= 1; got {pass_k=}")
    outcome = outcomes("pass_at_k", rewards, response_mask)
    groups = grouped("pass_at_k", rewards, group_id, at_least=pass_k + 1)
    # Relative to the group's best: where every set holds a best one, all that follows is exactly 0.
    below = outcome - groups.maximum(outcome)
    rank = _ranks(below, groups)
    size = groups.size
    is_best = _ratio(rank, pass_k - 1, size, pass_k)
    mean = groups.sum(is_best * below)
    std = groups.sum(is_best * (below - mean).square()).sqrt()
    # Of the sets that hold i: i is best in some, in others a response that ranks higher.
    own = _ratio(rank, pass_k - 1, size - 1, pass_k - 1) * below
    better = _ratio(rank - 1, pass_k - 2, size - 1, pass_k - 1) * below
    advantages = (own + _sum_above(better, rank, groups) - mean) / (std + GROUP_EPS)
    return Estimate(on_every_token(advantages, rewards, response_mask), None)


def _ranks(values: Tensor, groups: Groups) -> Tensor:
    """[B] int64: how many of each response's group come before it, from low to high."""
    by_value = values.argsort(stable=True)
    order = by_value[groups.index[by_value].argsort(stable=True)]
    start = groups.sizes.cumsum(0) - groups.sizes
    places = torch.arange(len(values)) - start[groups.index[order]]
    return torch.empty_like(places).scatter_(0, order, places)


def _sum_above(values: Tensor, rank: Tensor, groups: Groups) -> Tensor:
    """[B]: the sum of `values` over the responses of the same group that rank higher."""
    width = int(groups.sizes.max()) if len(groups.sizes) else 0
    table = values.new_zeros(len(groups.sizes), width + 1)
    table[groups.index, rank] = values
    from_here = table.flip(1).cumsum(1).flip(1)
    return from_here[groups.index, rank + 1]


def _ratio(n: Tensor, k: int, of_n: Tensor, of_k: int) -> Tensor:
    """C(n, k) / C(of_n, of_k) in float64; 0 where the first has nothing to choose."""
    possible = (n >= k) & (k >= 0)
    log_ratio = _log_choose(n.clamp(min=max(k, 0)), max(k, 0)) - _log_choose(of_n, of_k)
    return torch.where(possible, log_ratio.exp(), 0.0)


def _log_choose(n: Tensor, k: int) -> Tensor:
    """log C(n, k) in float64, 0 <= k <= n."""
    n = n.to(torch.float64)
    whole, taken = torch.lgamma(n + 1), torch.lgamma(torch.tensor(k + 1.0, dtype=n.dtype))
    return whole - taken - torch.lgamma(n - k + 1)
