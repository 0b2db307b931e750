"""Advantage estimator of pass@k training: the reward of k responses is that of the best one."""

import torch
from torch import Tensor

from hybridrl.algorithms.advantages import Estimate, group_wise
from hybridrl.algorithms.group_advantages import GROUP_EPS, Groups, grouped
from hybridrl.algorithms.outcomes import on_every_token, outcomes


@group_wise
def pass_at_k(rewards: Tensor, response_mask: Tensor, group_id: Tensor, *, pass_k: int) -> Estimate:
    """Compute pass@k GRPO advantages: the mean standardised reward of a response's k-sets.

    R_S = max_{j in S} r_j for each of the C(n, k) sets S of k responses to a prompt
    A_i = (mean_{S: i in S} R_S - mean_S R_S) / (std_S R_S + GROUP_EPS)

    r_j is the sum of j's token rewards; std_S divides by the number of sets. The moments are
    computed in closed form from the ranks of r, without enumerating sets. For rewards 0 and 1, with
    n_neg zeros, this is the paper's analytic form:

    mean_S = 1 - C(n_neg, k) / C(n, k),   std_S = sqrt(mean_S * (1 - mean_S))
    A_pos = (1 - mean_S) / std_S
    A_neg = (1 - mean_S - C(n_neg - 1, k - 1) / C(n - 1, k - 1)) / std_S

    If all sets have the same reward, advantages are 0. With k = 1 it is GRPO whose standard
    deviation divides by n.

    verl's grpo_passk is a different method: only the best response has an advantage, its distance
    from the second best.

    Arguments, shapes and errors are those of group_advantages.py; pass_k is k, at least 1, and less
    than the responses of every group. The A_i of a group sum to 0.

    Source: Chen et al. 2025, sections 2.3 (sets, for any rewards) and 2.4 (analytic, for rewards
        of 0 and 1), https://arxiv.org/abs/2508.10751
    """
    if pass_k < 1:
        raise ValueError(f"pass_at_k needs pass_k >= 1; got {pass_k=}")
    outcome = outcomes("pass_at_k", rewards, response_mask)
    groups = grouped("pass_at_k", rewards, group_id, at_least=pass_k + 1)
    # Relative to the group's maximum: if all sets contain a maximum, the rest is exactly 0.
    below = outcome - groups.maximum(outcome)
    rank = _ranks(below, groups)
    size = groups.size
    is_best = _ratio(rank, pass_k - 1, size, pass_k)
    mean = groups.sum(is_best * below)
    std = groups.sum(is_best * (below - mean).square()).sqrt()
    # Sets with i: those in which i is the best, and those in which a higher rank is the best.
    own = _ratio(rank, pass_k - 1, size - 1, pass_k - 1) * below
    better = _ratio(rank - 1, pass_k - 2, size - 1, pass_k - 1) * below
    advantages = (own + _sum_above(better, rank, groups) - mean) / (std + GROUP_EPS)
    return Estimate(on_every_token(advantages, rewards, response_mask), None)


def _ranks(values: Tensor, groups: Groups) -> Tensor:
    """Return [B] int64, each response's rank in its group, ascending from 0."""
    by_value = values.argsort(stable=True)
    order = by_value[groups.index[by_value].argsort(stable=True)]
    start = groups.sizes.cumsum(0) - groups.sizes
    places = torch.arange(len(values)) - start[groups.index[order]]
    return torch.empty_like(places).scatter_(0, order, places)


def _sum_above(values: Tensor, rank: Tensor, groups: Groups) -> Tensor:
    """Return [B], the sum of `values` over the responses of the group with a higher rank."""
    width = int(groups.sizes.max()) if len(groups.sizes) else 0
    table = values.new_zeros(len(groups.sizes), width + 1)
    table[groups.index, rank] = values
    from_here = table.flip(1).cumsum(1).flip(1)
    return from_here[groups.index, rank + 1]


def _ratio(n: Tensor, k: int, of_n: Tensor, of_k: int) -> Tensor:
    """Return C(n, k) / C(of_n, of_k) in float64; 0 if k < 0 or n < k."""
    possible = (n >= k) & (k >= 0)
    log_ratio = _log_choose(n.clamp(min=max(k, 0)), max(k, 0)) - _log_choose(of_n, of_k)
    return torch.where(possible, log_ratio.exp(), 0.0)


def _log_choose(n: Tensor, k: int) -> Tensor:
    """Return log C(n, k) in float64, 0 <= k <= n."""
    n = n.to(torch.float64)
    whole, taken = torch.lgamma(n + 1), torch.lgamma(torch.tensor(k + 1.0, dtype=n.dtype))
    return whole - taken - torch.lgamma(n - k + 1)
