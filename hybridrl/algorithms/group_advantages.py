"""Advantage estimators that compare the responses to one prompt: GRPO, RLOO, OPO, pass@k, ...

A group is the n responses to one prompt. r_i is the outcome of response i: the sum of its token
rewards, including the KL penalty if that acts in the reward. All tokens of response i share the
advantage A_i. mean_g and std_g are over the outcomes of i's group.

Arguments, shapes and errors are those of advantages.py; a group of a single response raises a
ValueError, too. G = groups. GRPO, Dr. GRPO and REINFORCE++ with baseline also take

    shares  [B] float64, where rows are parts of responses with outcomes of their own: the share of
            its response that a row is. mean_g and std_g weigh rows by it; n counts responses.

Advantages have the reward's unit, unless divided by a standard deviation.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hybridrl.algorithms.advantages import Estimate, group_wise, on_every_token, outcomes, whitened

# Added to a group's standard deviation before the division, in the reward's unit.
GROUP_EPS = 1.0e-6


class Groups(NamedTuple):
    """Partition of responses into groups.

    Attributes:
        index: [B] int64, group of each response, 0 to G - 1.
        sizes: [G] int64, responses of each group.
        shares: [B] float64, part of its response that each row is; None: all of it.
    """

    index: Tensor
    sizes: Tensor
    shares: Tensor | None = None

    @property
    def size(self) -> Tensor:
        """[B] int64: number of responses of each response's group."""
        return self.sizes[self.index]

    def sum(self, values: Tensor) -> Tensor:
        """Return [B] the sum of `values` [B] over each response's group, weighted by `shares`."""
        values = values if self.shares is None else values * self.shares
        total = values.new_zeros(len(self.sizes)).index_add_(0, self.index, values)
        return total[self.index]

    def maximum(self, values: Tensor) -> Tensor:
        """Return [B] the maximum of `values` [B] over each response's group."""
        largest = values.new_zeros(len(self.sizes)).scatter_reduce(
            0, self.index, values, "amax", include_self=False
        )
        return largest[self.index]

    def centred(self, values: Tensor) -> Tensor:
        """Return [B] `values` [B] minus their group's mean; exactly 0 if a group's are equal."""
        # Subtract a member of the group first: equal values are then 0 despite rounding.
        relative = values - self.maximum(values)
        return relative - self.sum(relative) / self.size


def grouped(
    function: str,
    rewards: Tensor,
    group_id: Tensor,
    shares: Tensor | None = None,
    *,
    at_least: int = 2,
) -> Groups:
    """Build the groups of a batch; raise a ValueError if one has less than `at_least` responses."""
    if group_id.shape != rewards.shape[:1]:
        raise ValueError(
            f"{function} needs rewards [B, T] and group_id [B]; got shapes "
            f"{tuple(rewards.shape)} and {tuple(group_id.shape)}"
        )
    names, index, sizes = group_id.unique(return_inverse=True, return_counts=True)
    if shares is not None:
        sizes = shares.new_zeros(len(names)).index_add(0, index, shares).round().long()
    too_small = sizes < at_least
    if bool(too_small.any()):
        raise ValueError(
            f"{function} needs at least {at_least} responses in every group; group "
            f"{int(names[too_small][0])} has {int(sizes[too_small][0])}"
        )
    return Groups(index, sizes, shares)


def _centred_outcomes(
    function: str, rewards: Tensor, mask: Tensor, group_id: Tensor, shares: Tensor | None = None
) -> tuple[Tensor, Groups]:
    """Return [B] float64 r_i - mean_g, and the groups."""
    outcome = outcomes(function, rewards, mask)
    groups = grouped(function, rewards, group_id, shares)
    return groups.centred(outcome), groups


@group_wise
def grpo(
    rewards: Tensor, response_mask: Tensor, group_id: Tensor, shares: Tensor | None = None
) -> Estimate:
    """Compute GRPO advantages: outcomes standardised within their group.

    A_i = (r_i - mean_g) / (std_g + GROUP_EPS)

    std_g divides by n - 1, as in verl and TRL. A group of equal outcomes has advantages 0.

    Source: Shao et al. 2024, section 4.1.2, https://arxiv.org/abs/2402.03300
    """
    centred, groups = _centred_outcomes("grpo", rewards, response_mask, group_id, shares)
    std = (groups.sum(centred.square()) / (groups.size - 1)).sqrt()
    return Estimate(on_every_token(centred / (std + GROUP_EPS), rewards, response_mask), None)


@group_wise
def dr_grpo(
    rewards: Tensor, response_mask: Tensor, group_id: Tensor, shares: Tensor | None = None
) -> Estimate:
    """Compute Dr. GRPO advantages: GRPO without the division by the standard deviation.

    A_i = r_i - mean_g

    Dividing by std_g gives more weight to prompts that are almost always or almost never solved.
    These advantages are (n - 1) / n times those of `rloo`. Dr. GRPO also changes the loss: see the
    aggregation sequence_sum. Same as TRL's scale_rewards=False and verl's
    norm_adv_by_std_in_grpo=False.

    Source: Liu et al. 2025, section 3.2, https://arxiv.org/abs/2503.20783
    """
    centred, _ = _centred_outcomes("dr_grpo", rewards, response_mask, group_id, shares)
    return Estimate(on_every_token(centred, rewards, response_mask), None)


@group_wise
def rloo(rewards: Tensor, response_mask: Tensor, group_id: Tensor) -> Estimate:
    """Compute RLOO advantages: the outcome minus the mean of the group's other outcomes.

    A_i = r_i - 1 / (n - 1) * sum_{j != i} r_j = n / (n - 1) * (r_i - mean_g)

    The baseline does not depend on response i, so the gradient is unbiased.

    Source: Ahmadian et al. 2024, the RLOO estimator, https://arxiv.org/abs/2402.14740
    """
    centred, groups = _centred_outcomes("rloo", rewards, response_mask, group_id)
    relative = centred * groups.size / (groups.size - 1)
    return Estimate(on_every_token(relative, rewards, response_mask), None)


@group_wise
def opo(rewards: Tensor, response_mask: Tensor, group_id: Tensor) -> Estimate:
    """Compute OPO advantages: the outcome minus the length-weighted mean outcome of the group.

    A_i = r_i - b_g,   b_g = sum_{j in g} l_j r_j / sum_{j in g} l_j

    l_j is the number of response tokens of j. The baseline minimises the gradient's variance if the
    squared norm of a response's gradient is proportional to its length. The sum of the advantages
    over the tokens of a group is 0. The paper trains with one update per rollout.

    Source: Hao et al. 2025, the simplified optimal baseline, https://arxiv.org/abs/2505.23585
    """
    outcome = outcomes("opo", rewards, response_mask)
    groups = grouped("opo", rewards, group_id)
    lengths = response_mask.sum(1).to(outcome.dtype)
    relative = outcome - groups.maximum(outcome)
    # A group without tokens has no advantages: any divisor is correct.
    baseline = groups.sum(lengths * relative) / groups.sum(lengths).clamp(min=1)
    return Estimate(on_every_token(relative - baseline, rewards, response_mask), None)


@whitened
def reinforce_plus_plus_baseline(
    rewards: Tensor, response_mask: Tensor, group_id: Tensor, shares: Tensor | None = None
) -> Estimate:
    """Compute REINFORCE++ advantages with baseline: group-centred, then whitened over the batch.

    A'_i = r_i - mean_g,   A_i = (A'_i - mean) / std

    mean and std (over N, with 1e-8 added to the variance) are over all tokens of the batch
    (`whitened`), so long responses have more weight. A group of equal outcomes has A' = 0 and
    A = -mean / std. If all A' are equal, A is 0.

    Same as verl, except that verl divides the variance by N - 1. OpenRLHF centres the reward alone
    and then sums the per-token KL penalties from each token on. Without a KL penalty in the reward,
    as in the paper (k2 in the loss), the two agree.

    Source: Hu et al. 2025, REINFORCE++ with baseline, https://arxiv.org/abs/2501.03262
    """
    name = "reinforce_plus_plus_baseline"
    centred, _ = _centred_outcomes(name, rewards, response_mask, group_id, shares)
    return Estimate(on_every_token(centred, rewards, response_mask), None)


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
    deviation divides by n. pass_k is k, at least 1, less than the responses of every group.

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
