"""A batch as it reaches the updates: random tokens and made-up statistics of them."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from hybridrl.data.batch import RolloutBatch
from hybridrl.data.partition import Partitioner, partition_by_micro_batch
from hybridrl.data.ragged import Ragged
from hybridrl.data.schedule import RankBatch, ScheduledBatch, UpdateSizes, schedule
from hybridrl.workers.actor import ActorWorker

PROMPTS = [3, 5, 2, 7, 4, 1, 6, 3]
RESPONSES = [4, 9, 1, 6, 12, 5, 2, 8]


def training_batch() -> RolloutBatch:
    """Eight responses of a 67-token vocabulary; some tokens are masked."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor(RESPONSES)

    def tokens(lengths):
        ids = torch.randint(0, 67, (int(lengths.sum()),), generator=generator)
        return Ragged(ids, lengths)

    def normal(mean=0.0, scale=1.0):
        return Ragged(mean + scale * torch.randn(sum(RESPONSES), generator=generator), lengths)

    mask = torch.ones(sum(RESPONSES), dtype=torch.bool)
    mask[[6, 7, 20]] = False
    # tiny random models are nearly uniform: log(1 / 67) = -4.2, give or take clip_ratio
    return RolloutBatch(
        prompts=tokens(torch.tensor(PROMPTS)),
        responses=tokens(lengths),
        response_mask=Ragged(mask, lengths),
        rollout_log_probs=normal(-4.2, 0.3),
        group_id=torch.arange(8),
        weight_version=torch.zeros(8, dtype=torch.int64),
        truncated=torch.zeros(8, dtype=torch.bool),
        added={
            "old_log_probs": normal(-4.2, 0.3),
            "ref_log_probs": normal(-4.2, 0.3),
            "values": normal(),
            "advantages": normal(),
            "returns": normal(),
        },
    )


def batch_with_experts():
    """The batch with 2 of 6 experts in 2 layers that no router would choose, none for last ones."""
    batch = training_batch()
    generator = torch.Generator().manual_seed(9)
    routed = []
    for tokens in batch.num_tokens.tolist():
        ids = torch.rand(tokens, 2, 6, generator=generator).topk(2).indices + 1
        ids[-1] = 0
        routed.append(ids.flatten())
    return replace(batch, routed_experts=Ragged.from_rows(routed, torch.uint8))


def with_sets(batch: RolloutBatch, most: int = 9) -> RolloutBatch:
    """The batch with sets of 1 to `most` of 67 tokens, each with the response's token."""
    generator = torch.Generator().manual_seed(11)
    rows = []
    for token in batch.responses.values.tolist():
        more = torch.randperm(67, generator=generator)[: len(rows) % most].tolist()
        rows.append(sorted({token, *more}))
    counts = batch.responses.like(torch.tensor([len(row) for row in rows], dtype=torch.int32))
    ids = torch.tensor([token for row in rows for token in row], dtype=torch.int32)
    sizes = torch.tensor([int(row.sum()) for row in counts.rows()])
    return replace(batch, kept_ids=Ragged(ids, sizes), kept_counts=counts)


def scheduled(
    batch: RolloutBatch,
    *,
    num_ranks: int,
    mini_batch_size: int,
    max_tokens: int,
    epochs: int = 1,
    step: int = 1,
    partition: Partitioner = partition_by_micro_batch,
    share_prefixes: bool = False,
) -> ScheduledBatch:
    """The batch partitioned over ranks by its tokens."""
    sizes = UpdateSizes(
        num_ranks,
        mini_batch_size,
        epochs,
        max_tokens,
        cost=float,
        partition=partition,
        share_prefixes=share_prefixes,
    )
    return schedule(batch, sizes, seed=1, step=step)


def my_part(
    batch: RolloutBatch, mini_batch_size: int = 4, max_tokens: int = 30, step: int = 1
) -> RankBatch:
    """This rank's share of the batch, of which every rank has one."""
    ranks = dist.get_world_size()
    dealt = scheduled(
        batch, num_ranks=ranks, mini_batch_size=mini_batch_size, max_tokens=max_tokens, step=step
    )
    return dealt.shard(ranks)[dist.get_rank()]


def with_old_log_probs(batch: RolloutBatch, actor: ActorWorker) -> RolloutBatch:
    """The batch with log-probs of the actor as it is; a collective."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, actor.compute_log_probs(my_part(batch)))
    dealt = scheduled(batch, num_ranks=len(parts), mini_batch_size=4, max_tokens=30)
    return batch.adding(old_log_probs=dealt.join(parts))
