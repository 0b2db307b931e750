"""Who computes what in an update: mini-batches, the rank of each response, micro-batches.

The controller draws mini-batches from the global batch by a function of (seed, step, epoch) and
deals each to the ranks and to micro-batches (dealing.py). Every rank gets equally many of these
(FSDP's collectives would hang otherwise), as few as the token budget allows.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridrl.config.planner.flops import sequence_cost
from hybridrl.config.planner.model_shape import ModelShape
from hybridrl.config.schema import ActorConfig
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.dealing import Dealer, dealer_for
from hybridrl.data.ragged import Ragged, concat
from hybridrl.data.seeds import derive_seed
from hybridrl.data.shardable import Piece, Shardable
from hybridrl.data.totals import Totals

# indices[epoch][mini][micro] -> responses
Epochs = list[list[list[list[int]]]]


class MiniBatch(NamedTuple):
    """One rank's part of an optimizer step.

    Attributes:
        micros: its packed micro-batches; every rank has equally many.
        totals: what its loss is divided by, over all ranks.
    """

    micros: list[RolloutBatch]
    totals: Totals


# By epoch and mini-batch, as in `MiniBatch`.
EpochTotals = list[list[Totals]]


@dataclass(frozen=True)
class RankBatch:
    """One rank's responses of a step and the order in which it computes them.

    Attributes:
        batch: every response this rank touches in some epoch.
        epochs: indices into `batch`, by epoch, mini-batch and micro-batch.
        sampled: totals of response_mask, the tokens that the policy sampled.
        counted: totals of loss_mask, those that count in the policy loss.
    """

    batch: RolloutBatch
    epochs: Epochs
    sampled: EpochTotals
    counted: EpochTotals

    def micro_batches(self, epoch: int) -> Iterator[RolloutBatch]:
        """The packed forwards of one epoch, in the order in which `update` runs them."""
        for mini in self.epochs[epoch]:
            for micro in mini:
                yield self.batch.select(micro)

    def mini_batches(self) -> Iterator[MiniBatch]:
        """What this rank computes for each optimizer step of each epoch; all tokens count."""
        return self._mini_batches(self.sampled)

    def policy_mini_batches(self) -> Iterator[MiniBatch]:
        """The same for the policy loss, in which the tokens of loss_mask count."""
        return self._mini_batches(self.counted)

    def map_first_epoch(self, compute: Callable[[RolloutBatch], Ragged]) -> Ragged:
        """`compute` on each micro-batch of the first epoch, rows in that order."""
        return concat([compute(micro) for micro in self.micro_batches(epoch=0)])

    def _mini_batches(self, totals: EpochTotals) -> Iterator[MiniBatch]:
        for epoch, of_epoch in zip(self.epochs, totals, strict=True):
            for mini, of_mini in zip(epoch, of_epoch, strict=True):
                yield MiniBatch([self.batch.select(micro) for micro in mini], of_mini)


@dataclass(frozen=True)
class ScheduledBatch(Shardable):
    """A global batch and who computes what.

    Attributes:
        batch: the responses of the step.
        ranks: for each rank, indices into `batch` by epoch, mini-batch and micro-batch.
        rows: for each rank, the responses it touches in some epoch, rising.
        cut: for each rank the pieces of its `RankBatch`: the batch as it was scheduled, then what
            each `adding` added.
    """

    batch: RolloutBatch
    ranks: list[Epochs]
    rows: list[list[int]]
    cut: list[list[Piece]]

    @classmethod
    def of(cls, batch: RolloutBatch, ranks: list[Epochs]) -> "ScheduledBatch":
        """A batch cut as the ranks' indices say."""
        sampled, counted = _totals(ranks, batch.response_mask), _totals(ranks, batch.counted)

        def whole(rows: list[int], epochs: Epochs) -> RankBatch:
            return RankBatch(batch.select(rows), epochs, sampled, counted)

        parts = [_renumbered(epochs) for epochs in ranks]
        cut = [[Piece(partial(whole, *part))] for part in parts]
        return cls(batch, ranks, [rows for rows, _ in parts], cut)

    def adding(self, **new: Ragged) -> "ScheduledBatch":
        """The same schedule with fields filled in, which alone are still to be sent.

        Raises:
            ValueError: a field's rows are not as long as the responses.
        """

        def added(rows: list[int]) -> dict[str, Ragged]:
            return {name: value.select(rows) for name, value in new.items()}

        batch = self.batch.adding(**new)
        cut = [
            [*pieces, Piece(partial(added, rows))]
            for pieces, rows in zip(self.cut, self.rows, strict=True)
        ]
        return replace(self, batch=batch, cut=cut)

    def keeping(self, batch: RolloutBatch) -> "ScheduledBatch":
        """The same schedule of the batch with fields filled in that ranks do not get.

        Raises:
            ValueError: these are other responses.
        """
        if not torch.equal(batch.responses.lengths, self.batch.responses.lengths):
            raise ValueError("a schedule keeps its own responses only")
        return replace(self, batch=batch)

    def pieces(self, num_shards: int) -> list[list[Piece]]:
        """What each rank's `RankBatch` is made of; `num_shards` must be the ranks scheduled."""
        assert num_shards == len(self.ranks), (num_shards, len(self.ranks))
        return self.cut

    @staticmethod
    def assemble(contents: Sequence[Any]) -> RankBatch:
        """A rank's batch with the fields that were added to it."""
        first, *added = contents
        fields = {name: value for more in added for name, value in more.items()}
        return replace(first, batch=first.batch.adding(**fields))

    def shard(self, num_shards: int) -> list[RankBatch]:
        """What each rank receives."""
        return [
            self.assemble([piece.content for piece in pieces]) for pieces in self.pieces(num_shards)
        ]

    def join(self, results: Sequence[Ragged]) -> Ragged:
        """Per-rank results of `map_first_epoch` in the order of `batch`.

        Raises:
            ValueError: a rank's rows are not as long as its responses.
        """
        lengths = torch.cat([result.lengths for result in results])
        if not torch.equal(lengths, self.batch.responses.lengths[self._first_epochs]):
            raise ValueError("a result does not have one value per response token")
        return concat(results, self._first_epochs.argsort())

    @cached_property
    def _first_epochs(self) -> Tensor:
        """[B]: the responses in the order in which the ranks' first epochs compute them."""
        return torch.tensor(
            [i for epochs in self.ranks for mini in epochs[0] for micro in mini for i in micro]
        )


def _renumbered(epochs: Epochs) -> tuple[list[int], Epochs]:
    """The responses that a rank touches, rising, and its epochs with indices into them."""
    used = sorted({i for epoch in epochs for mini in epoch for micro in mini for i in micro})
    local = {index: k for k, index in enumerate(used)}
    return used, [[[[local[i] for i in m] for m in mini] for mini in epoch] for epoch in epochs]


def _totals(ranks: Sequence[Epochs], mask: Ragged) -> EpochTotals:
    """What a mask leaves of each mini-batch over all ranks, by epoch and mini-batch."""
    of_response = mask.counts().tolist()
    totals: EpochTotals = []
    for per_rank in zip(*ranks, strict=True):
        totals.append([])
        for minis in zip(*per_rank, strict=True):
            counts = [of_response[i] for mini in minis for micro in mini for i in micro]
            totals[-1].append(Totals(sum(counts), sum(count > 0 for count in counts)))
    return totals


@dataclass(frozen=True)
class UpdateSizes:
    """How the responses of a step are cut.

    Attributes:
        num_shards: ranks, or groups of ranks that share sequences; must divide mini_batch_size.
        mini_batch_size: responses per optimizer step, over all ranks.
        epochs: passes over the batch, each in an order of its own.
        max_tokens: budget of one micro-batch on one shard, prompt and response tokens. A single
            longer response is a micro-batch of its own.
        cost: what a sequence of so many tokens costs, in any unit.
        deal: who computes which responses of a mini-batch.
    """

    num_shards: int
    mini_batch_size: int
    epochs: int
    max_tokens: int
    cost: Callable[[int], float]
    deal: Dealer


def update_sizes(config: ActorConfig, num_shards: int, shape: ModelShape) -> UpdateSizes:
    """How a run cuts its responses; a sequence's cost is the time of its forward and backward.

    Args:
        config: sizes, shared with the critic.
        num_shards: ranks that train, or groups of fsdp.ulysses_size of them.
        shape: the model's.
    """
    return UpdateSizes(
        num_shards=num_shards,
        mini_batch_size=config.mini_batch_size,
        epochs=config.epochs,
        max_tokens=config.max_tokens_per_gpu * config.fsdp.ulysses_size,
        cost=partial(sequence_cost, shape),
        deal=dealer_for(config.fsdp),
    )


def schedule(batch: RolloutBatch, sizes: UpdateSizes, *, seed: int, step: int) -> ScheduledBatch:
    """Draw mini-batches from `batch` and deal them to ranks and micro-batches.

    Args:
        batch: B responses; B must be a multiple of sizes.mini_batch_size.
        sizes: how it is cut.
        seed, step: with the epoch they determine the order.

    Raises:
        ValueError: the sizes do not divide.
    """
    per_step = sizes.mini_batch_size
    if len(batch) % per_step or per_step % sizes.num_shards:
        raise ValueError(
            f"{len(batch)} responses cannot be cut into mini-batches of {per_step} "
            f"for {sizes.num_shards} ranks"
        )
    tokens = batch.num_tokens.tolist()
    cost = [sizes.cost(count) for count in tokens]
    ranks: list[Epochs] = [[] for _ in range(sizes.num_shards)]
    for epoch in range(sizes.epochs):
        order = _shuffled(len(batch), seed, step, epoch)
        minis = [order[start : start + per_step] for start in range(0, len(order), per_step)]
        dealt = [
            sizes.deal(mini, cost, tokens, sizes.num_shards, sizes.max_tokens) for mini in minis
        ]
        for rank, epochs in enumerate(ranks):
            epochs.append([per_rank[rank] for per_rank in dealt])
    return ScheduledBatch.of(batch, ranks)


def _shuffled(size: int, seed: int, step: int, epoch: int) -> list[int]:
    generator = torch.Generator().manual_seed(derive_seed(seed, "mini_batches", step, epoch))
    return torch.randperm(size, generator=generator).tolist()
