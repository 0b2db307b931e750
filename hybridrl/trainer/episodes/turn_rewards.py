"""Rewards of an episode's turns, on tokens, and turns as members of their group.

Let R be the reward of the whole episode, less a KL penalty in the reward, and r_j that of turn j.
The reward-to-go of turn k is

    G_k = R + sum of r_j over turn k and the turns that ended after it, in any conversation

Estimators that read rewards per token (GAE, REINFORCE++) find r on the last tokens of turns. Those
that compare a group do so with the turns of its episodes. An episode counts once there: each of its
n_e turns has the weight 1 / n_e. For GRPO, with E episodes e in the group

    A_k = (G_k - mean) / std
    mean = 1 / E sum_e 1 / n_e sum_{k in e} G_k
    std^2 = 1 / (E - 1) sum_e 1 / n_e sum_{k in e} (G_k - mean)^2

If no turn of an episode has a reward, all its G are its outcome, and it counts as it would without
rewards of turns. So a group's advantages do not depend on what others have earned.

A turn is not credited with rewards before it, as in REINFORCE (Williams 1992). GRPO's process
supervision (Shao et al. 2024, section 4.1.3, https://arxiv.org/abs/2402.03300) standardises r and
sums then. Here the sums are standardised, so that A_k does not grow with the number of later turns.
"""

import torch
from torch import Tensor

from hybridrl.config.estimators import BUILT_IN_ESTIMATORS
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.trainer.errors import RunStopped


def has_turn_rewards(batch: RolloutBatch) -> bool:
    """Return whether a program reported rewards of turns."""
    return "turn_rewards" in batch.added and bool(batch.turn_rewards.values.any())


def with_turn_rewards(scores: Ragged, episodes: RolloutBatch) -> Ragged:
    """Move the rewards of turns, which the score of each episode includes, to their tokens."""
    values = scores.values + episodes.turn_rewards.values
    values[episodes.last_sampled] -= torch.stack([r.sum() for r in episodes.turn_rewards.rows()])
    return scores.like(values)


def by_turn(
    estimator: str, batch: RolloutBatch, rewards: Ragged, sequences: Tensor
) -> tuple[RolloutBatch, Ragged, Tensor]:
    """Cut episodes whose turns have rewards into turns; return rows, rewards and weights of rows.

    A turn has the tokens before it, too. Its reward-to-go is on its last sampled token, its weight
    is 1 / n_e. Other episodes stay as they are.

    Args:
        estimator: as algorithm.advantage.
        batch: of episodes, and `rewards` of its tokens.
        sequences: lengths of the episodes' token sequences.

    Raises:
        RunStopped: the estimator compares whole episodes.
    """
    of_turns = [name for name, known in BUILT_IN_ESTIMATORS.items() if known.compares_turns]
    if estimator not in of_turns:
        raise RunStopped(
            f"algorithm.advantage = {estimator} compares whole episodes, but the program reported "
            f"rewards of turns.\nSet algorithm.advantage to {', '.join(of_turns)}, gae or "
            f"reinforce_plus_plus, or let the program return their sum as one reward."
        )
    is_cut = batch.turn_rewards.counts() > 0
    starts, ends = _turns(batch.response_mask, sequences)
    rows = batch.response_mask.row_ids()[ends]
    is_first = rows.diff(prepend=rows.new_tensor([-1])) > 0
    is_last = is_first.roll(-1)
    starts, ends = starts[is_cut[rows] | is_first], ends[is_cut[rows] | is_last]
    rows = batch.response_mask.row_ids()[ends]
    earned = batch.turn_rewards.values.double().cumsum(0) - batch.turn_rewards.values
    row_starts = batch.response_mask.lengths.cumsum(0) - batch.response_mask.lengths
    before = earned[starts] - earned[row_starts[rows]]
    outcome = torch.segment_reduce(rewards.values.double(), "sum", lengths=rewards.lengths)
    lengths = ends.diff(prepend=ends.new_tensor([-1]))
    turns = batch.with_rows(lengths, rows)
    values = rewards.values.masked_fill(rewards.spread(is_cut), 0.0)
    to_go = (outcome[rows] - before).to(values.dtype)
    values[turns.last_sampled[is_cut[rows]]] = to_go[is_cut[rows]]
    return turns, Ragged(values, lengths), 1.0 / rows.bincount()[rows].double()


def _turns(mask: Ragged, sequences: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first sampled token of each turn, and the last token that belongs to it.

    Together they have all tokens: the last turn of a row ends with it, and a row without a sampled
    token is a turn.
    """
    sampled, last = mask.values, sequences.cumsum(0) - 1
    is_start, is_end = sampled.clone(), sampled.clone()
    is_start[1:] &= ~sampled[:-1]
    is_start[last[:-1] + 1] = sampled[last[:-1] + 1]
    is_end[:-1] &= ~sampled[1:]
    is_end[last] = sampled[last]
    rows, row_ends = mask.row_ids(), mask.lengths.cumsum(0) - 1
    row_starts = row_ends - mask.lengths + 1
    ends = is_end.nonzero().flatten()
    is_last = torch.cat([rows[ends].diff(), torch.ones(min(len(ends), 1))]) > 0
    is_end[ends[is_last]] = False
    is_end[row_ends] = True
    is_start[row_starts[mask.counts() == 0]] = True
    return is_start.nonzero().flatten(), is_end.nonzero().flatten()
