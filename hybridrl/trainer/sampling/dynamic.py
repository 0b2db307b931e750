"""Dynamic sampling: prompts whose responses have equal rewards are replaced by the next.

Source: Yu et al. 2025 (DAPO), section 3.2, https://arxiv.org/abs/2503.14476
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import torch

from hybridrl.data.batch import RolloutBatch
from hybridrl.data.requests import total_stats
from hybridrl.trainer.episodes.responses import Group
from hybridrl.trainer.rewarding import Rewarded
from hybridrl.trainer.sampling.source import Metrics, Sampled, Source, SourceParts, without_loss


class DynamicSampling(Source):
    """Source of groups of another source whose rewards differ.

    Each round takes exactly the missing groups, so that no mixed one is thrown away. Unmixed groups
    of the last round fill the batch; they do not count in the policy loss.
    """

    def __init__(self, source: Source, parts: SourceParts) -> None:
        self._source = source
        self._rewards = parts.rewards
        self._each = parts.config.rollout.responses_per_prompt
        self._max_rounds = parts.config.algorithm.max_sampling_rounds

    def take(self, step: int, count: int) -> Sampled:
        """Take up to algorithm.max_sampling_rounds times."""
        missing, kept = count, list[Sampled]()
        rewards: list[tuple[Rewarded, list[int]]] = []
        while missing and len(kept) < self._max_rounds:
            done = self._source.take(step, missing)
            rewarded = self._rewards.score(done.prompts, done.batch)
            of_prompts = torch.tensor(rewarded.scores).view(missing, self._each)
            is_mixed = (of_prompts != of_prompts[:, :1]).any(1)
            missing -= int(is_mixed.sum())
            is_last = not missing or len(kept) + 1 == self._max_rounds
            order = (~is_mixed).long().argsort(stable=True)
            order = order if is_last else order[: int(is_mixed.sum())]
            rows = (order[:, None] * self._each + torch.arange(self._each)).flatten().tolist()
            rewards.append((rewarded, rows))
            kept.append(Sampled(done.batch.select(rows), [done.prompts[row] for row in rows]))
        scores = [score for rewarded, _ in rewards for score in rewarded.scores]
        num_prompts, mixed = len(scores) // self._each, count - missing
        metrics = {
            "sampling/rounds": float(len(kept)),
            "sampling/prompts": float(num_prompts),
            "sampling/mixed_fraction": mixed / num_prompts,
            "sampling/unmixed_prompts": float(missing),
            "sampling/reward_mean": fmean(scores),
        }
        sampled = replace(_joined(kept), rewarded=Rewarded.joined(rewards), metrics=metrics)
        if not missing:
            return sampled
        return without_loss(sampled, torch.arange(len(sampled.prompts)) >= mixed * self._each)

    def begin_update(self, step: int, batch: RolloutBatch) -> Metrics:
        """Return metrics of the other source."""
        return self._source.begin_update(step, batch)

    def after_update(self, step: int) -> Metrics:
        """Return metrics of the other source."""
        return self._source.after_update(step)

    def state(self) -> tuple[Group, ...]:
        """Return the groups in flight of the other source."""
        return self._source.state()

    def restore(self, groups: Sequence[Group]) -> None:
        """Restore the groups in flight of the other source."""
        self._source.restore(groups)


def _joined(parts: Sequence[Sampled]) -> Sampled:
    """Join the rounds; groups of one prompt in two rounds stay separate."""
    batches = [part.batch for part in parts]
    batch = RolloutBatch.concat(batches)
    sizes = torch.tensor([len(part.prompts) for part in parts])
    rounds = torch.arange(len(parts)).repeat_interleave(sizes)
    group_id = batch.group_id + rounds * (int(batch.group_id.max()) + 1)
    batch = replace(
        batch,
        group_id=group_id,
        engines=total_stats([part.engines for part in batches if part.engines], first_token=max),
        environment_s=sum(part.environment_s for part in batches),
    )
    return Sampled(batch, [prompt for part in parts for prompt in part.prompts])
