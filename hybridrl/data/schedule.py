"""Schedule of an update: mini-batches, the rank of each response, micro-batches.

The controller draws mini-batches from the global batch by a function of (seed, step, epoch).
Each is partitioned over the ranks and into micro-batches (partition.py). Every rank has the same
number of micro-batches, or FSDP's collectives would hang.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from hybridrl.config.choices import Targets
from hybridrl.config.planner.flops import attention_flops, sequence_cost
from hybridrl.config.planner.shape import ModelShape
from hybridrl.config.planner.training_memory import key_share
from hybridrl.config.policy_losses import policy_loss_of
from hybridrl.config.schema import ActorConfig
from hybridrl.data.batch import RolloutBatch, Totals
from hybridrl.data.images import PromptImages
from hybridrl.data.partition import Micros, Partitioner, partitioner_for
from hybridrl.data.ragged import Ragged, concat
from hybridrl.data.seeds import derive_seed
from hybridrl.data.shardable import Piece, Shardable
from hybridrl.data.units import Rows, shared, whole_rows

# indices[epoch][mini][micro] -> responses
Epochs = list[list[list[list[int]]]]
# [epoch][mini]
EpochTotals = list[list[Totals]]
# One rank's part of each optimizer step: its micro-batches, and the totals over all ranks by which
# their loss is divided.
MiniBatches = Iterator[tuple[list[RolloutBatch], Totals]]


@dataclass(frozen=True)
class RankBatch:
    """One rank's responses of a step, and the order in which it computes them.

    Attributes:
        batch: [b] responses that this rank computes in some epoch.
        epochs: [epoch][mini][micro] lists of indices into `batch`.
        sampled: [epoch][mini] totals of response_mask over all ranks, for the value loss.
        counted: [epoch][mini] totals of `RolloutBatch.counted`, for the policy loss.
    """

    batch: RolloutBatch
    epochs: Epochs
    sampled: EpochTotals
    counted: EpochTotals

    def micro_batches(self, epoch: int) -> Iterator[RolloutBatch]:
        """Yield the micro-batches of one epoch in the order in which `update` computes them."""
        for mini in self.epochs[epoch]:
            for micro in mini:
                yield self.batch.select(micro)

    def mini_batches(self, totals: EpochTotals | None = None) -> MiniBatches:
        """Yield (micro-batches, totals) of each optimizer step; by default all sampled tokens."""
        for epoch, of_epoch in zip(self.epochs, totals or self.sampled, strict=True):
            for mini, of_mini in zip(epoch, of_epoch, strict=True):
                yield [self.batch.select(micro) for micro in mini], of_mini

    def policy_mini_batches(self) -> MiniBatches:
        """Yield the same for the policy loss, in which only counted tokens count."""
        return self.mini_batches(self.counted)

    def map_first_epoch(self, compute: Callable[[RolloutBatch], Ragged]) -> Ragged:
        """Concatenate `compute` of each micro-batch of the first epoch, rows in that order."""
        return concat([compute(micro) for micro in self.micro_batches(epoch=0)])


@dataclass(frozen=True)
class ScheduledBatch(Shardable):
    """The global batch of a step and its partition over ranks and micro-batches.

    Attributes:
        batch: [B] responses of the step; fields that `adding` has not added stay with the driver.
        ranks: [rank][epoch][mini][micro] lists of indices into `batch`.
        rows: [rank] ascending indices of the responses that a rank computes in some epoch.
        rank_pieces: [rank] pieces of its `RankBatch`: the batch as scheduled, then the fields of
            each `adding`.
    """

    batch: RolloutBatch
    ranks: list[Epochs]
    rows: list[list[int]]
    rank_pieces: list[list[Piece]]

    @classmethod
    def of(cls, batch: RolloutBatch, ranks: list[Epochs]) -> "ScheduledBatch":
        """Build the schedule of a batch from the ranks' indices."""
        # The responses of an agent's episode may be on several ranks.
        tokens = batch.summed_over_episodes(batch.counted.counts())
        batch = batch.adding(episode_tokens=tokens)
        masks, episodes = (batch.response_mask, batch.counted), batch.episode_index.tolist()
        sampled, counted = (_totals(ranks, mask, episodes) for mask in masks)

        def whole(rows: list[int], epochs: Epochs) -> RankBatch:
            return RankBatch(batch.select(rows), epochs, sampled, counted)

        parts = [_renumbered(epochs) for epochs in ranks]
        pieces: list[list[Piece]] = [[partial(whole, *part)] for part in parts]
        return cls(batch, ranks, [rows for rows, _ in parts], pieces)

    def adding(self, **new: Ragged) -> "ScheduledBatch":
        """Return the same schedule with fields filled in; only these are sent to the ranks."""

        def added(rows: list[int]) -> dict[str, Ragged]:
            return {name: value.select(rows) for name, value in new.items()}

        batch = self.batch.adding(**new)
        pieces: list[list[Piece]] = [
            [*sent, partial(added, rows)]
            for sent, rows in zip(self.rank_pieces, self.rows, strict=True)
        ]
        return replace(self, batch=batch, rank_pieces=pieces)

    def pieces(self, num_shards: int) -> list[list[Piece]]:
        """Return the pieces of each rank's `RankBatch`; `num_shards` is the number of ranks."""
        assert num_shards == len(self.ranks), (num_shards, len(self.ranks))
        return self.rank_pieces

    @staticmethod
    def assemble(contents: Sequence[Any]) -> RankBatch:
        """Return a rank's batch with the fields that were added to it."""
        first, *added = contents
        fields = {name: value for more in added for name, value in more.items()}
        return replace(first, batch=first.batch.adding(**fields))

    def join(self, results: Sequence[Ragged]) -> Ragged:
        """Return the ranks' results of `map_first_epoch` in the order of `batch`.

        Raises:
            ValueError: a rank's rows are not as long as its responses.
        """
        lengths = torch.cat([result.lengths for result in results])
        if not torch.equal(lengths, self.batch.responses.lengths[self._first_epochs]):
            raise ValueError("a result does not have one value per response token")
        return concat(results, self._first_epochs.argsort())

    def computed(self, sizes: "UpdateSizes") -> tuple[int, float]:
        """Return the tokens of a forward of the first epoch, and its operations in attention."""
        lengths, once = self.batch.num_tokens.tolist(), list[int]()
        if sizes.share_prefixes:
            rows = whole_rows(self.batch.prompts, self.batch.responses)
            micros = [m for epochs in self.ranks for mini in epochs[0] for m in mini]
            once = [count for m in micros for _, _, count in shared([rows[row] for row in m])]
        attention = sum(map(sizes.attention, lengths)) - sum(map(sizes.attention, once))
        return sum(lengths) - sum(once), attention

    @cached_property
    def _first_epochs(self) -> Tensor:
        """[B] int64: the responses in the order in which the ranks' first epochs compute them."""
        return torch.tensor(
            [i for epochs in self.ranks for mini in epochs[0] for micro in mini for i in micro]
        )


def _renumbered(epochs: Epochs) -> tuple[list[int], Epochs]:
    """Return the ascending responses of a rank, and its epochs with indices into these."""
    used = sorted({i for epoch in epochs for mini in epoch for micro in mini for i in micro})
    local = {index: k for k, index in enumerate(used)}
    return used, [[[[local[i] for i in m] for m in mini] for mini in epoch] for epoch in epochs]


def _in_rows(micros: Micros, units: Sequence[Sequence[int]]) -> Micros:
    """Return micro-batches of units as micro-batches of their responses."""
    return [[row for unit in micro for row in units[unit]] for micro in micros]


def _totals(ranks: Sequence[Epochs], mask: Ragged, episodes: list[int]) -> EpochTotals:
    """Count each mini-batch's tokens on the mask, and episodes with such tokens, on all ranks."""
    of_response = mask.counts().tolist()
    totals: EpochTotals = []
    for per_rank in zip(*ranks, strict=True):
        totals.append([])
        for minis in zip(*per_rank, strict=True):
            rows = [i for mini in minis for micro in mini for i in micro if of_response[i]]
            counts = sum(of_response[i] for i in rows), len({episodes[i] for i in rows})
            totals[-1].append(Totals(*counts))
    return totals


@dataclass(frozen=True)
class UpdateSizes:
    """Sizes of an update.

    Attributes:
        num_shards: ranks, or groups of ranks that share sequences; must divide mini_batch_size.
        mini_batch_size: responses per optimizer step, over all ranks.
        epochs: passes over the batch, each in a different order.
        max_tokens: budget of one micro-batch on one shard, prompt and response tokens. A single
            longer response is a micro-batch of its own.
        cost: tokens of a sequence -> its cost, in any unit.
        image_cost: images of a sequence -> their cost, in the same unit.
        partition: splits a mini-batch over ranks and into micro-batches.
        whole_episodes: the responses of an episode share a micro-batch, as the loss compares them.
        share_prefixes: first tokens that sequences of a micro-batch share are computed once;
            responses to a prompt stay together there, too.
        key_size: memory of a shared token's keys, which each sequence reads, over a token's.
        attention: tokens of a sequence -> operations in attention of a forward.
    """

    num_shards: int
    mini_batch_size: int
    epochs: int
    max_tokens: int
    cost: Callable[[int], float]
    partition: Partitioner
    whole_episodes: bool = False
    image_cost: Callable[[PromptImages], float] = len
    share_prefixes: bool = False
    key_size: float = 0.0
    attention: Callable[[int], float] = float


def update_sizes(config: ActorConfig, num_shards: int, shape: ModelShape) -> UpdateSizes:
    """Return the sizes of a run's updates; cost is the time of a forward and backward."""
    return UpdateSizes(
        num_shards=num_shards,
        mini_batch_size=int(config.mini_batch_size),
        epochs=config.epochs,
        max_tokens=config.max_tokens_per_gpu * config.fsdp.ulysses_size,
        cost=partial(sequence_cost, shape),
        partition=partitioner_for(config.fsdp),
        whole_episodes=policy_loss_of(config.algorithm.loss.function).targets is Targets.pairs,
        image_cost=partial(images_cost, shape, trains=config.train_vision),
        share_prefixes=config.fsdp.share_prefixes,
        key_size=key_share(shape, config.fsdp) if config.fsdp.share_prefixes else 0.0,
        attention=partial(attention_flops, shape),
    )


def images_cost(shape: ModelShape, images: PromptImages, *, trains: bool) -> float:
    """Return the relative time of a prompt's images in the tower, in the unit of its tokens."""
    passes = 3 if trains else 1
    sizes = images.sizes
    return passes * sum(shape.vision.flops(shape.vision.patches(size)) for size in sizes)


def schedule(batch: RolloutBatch, sizes: UpdateSizes, *, seed: int, step: int) -> ScheduledBatch:
    """Draw mini-batches from `batch` and partition them over ranks and micro-batches.

    Seed, step and epoch determine the order of prompts, whose responses follow each other. All
    responses of an episode are in one mini-batch.

    Raises:
        ValueError: the sizes do not divide.
    """
    per_step, ends = sizes.mini_batch_size, (batch.last_of_episodes + 1).tolist()
    members = [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    if len(members) % per_step or per_step % sizes.num_shards:
        raise ValueError(
            f"{len(members)} responses cannot be cut into mini-batches of {per_step} "
            f"for {sizes.num_shards} ranks"
        )
    whole = batch.num_tokens
    if "teacher_prompts" in batch.added:  # in whose place teachers may read longer ones
        whole = whole.maximum(batch.teacher_prompts.lengths + batch.responses.lengths)
    lengths = whole.tolist()
    cost = [sizes.cost(length) for length in lengths]
    if batch.images is not None:  # of each row, though a micro-batch computes equal ones once
        images = zip(cost, batch.images.rows, strict=True)
        cost = [one + (sizes.image_cost(own) if own else 0.0) for one, own in images]
    tokens_of = whole_rows(batch.prompts, batch.responses) if sizes.share_prefixes else []
    answers = batch.responses.lengths.tolist()
    rows = Rows(lengths, cost, batch.group_id.tolist(), tokens_of, answers, sizes.key_size)
    ranks: list[Epochs] = [[] for _ in range(sizes.num_shards)]
    for epoch in range(sizes.epochs):
        generator = torch.Generator().manual_seed(derive_seed(seed, "mini_batches", step, epoch))
        order = torch.randperm(len(members), generator=generator).tolist()
        order = rows.by_prompt(order, [unit[0] for unit in members])
        partitions = []
        for start in range(0, len(order), per_step):
            units: list[Sequence[int]] = [members[one] for one in order[start : start + per_step]]
            if not sizes.whole_episodes:
                flat = [row for unit in units for row in unit]
                units = rows.units(flat, sizes.num_shards, sizes.max_tokens)
            units.sort(key=itemgetter(0))  # units of equal cost are dealt in this order
            costs, tokens = zip(*map(rows.size, units), strict=True)
            mini = [*range(len(units))]
            per_rank = sizes.partition(mini, costs, tokens, sizes.num_shards, sizes.max_tokens)
            partitions.append([_in_rows(micros, units) for micros in per_rank])
        for rank, epochs in enumerate(ranks):
            epochs.append([per_rank[rank] for per_rank in partitions])
    return ScheduledBatch.of(batch, ranks)
