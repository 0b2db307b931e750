"""Who computes what in an update: mini-batches, the rank of each response, micro-batches.

The controller draws mini-batches from the global batch by a function of (seed, step, epoch) and
deals each to the ranks. Every rank gets equally many responses and equally many micro-batches of
each mini-batch (FSDP's collectives would hang otherwise); within that, tokens are balanced.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from hybridrl.data.balance import balance
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.ragged import Ragged, concat
from hybridrl.data.seeds import derive_seed

# indices[epoch][mini][micro] -> responses
Epochs = list[list[list[list[int]]]]


@dataclass(frozen=True)
class RankBatch:
    """One rank's responses of a step and the order in which it computes them.

    Attributes:
        batch: every response this rank touches in some epoch.
        epochs: indices into `batch`, by epoch, mini-batch and micro-batch.
    """

    batch: RolloutBatch
    epochs: Epochs

    def micro_batches(self, epoch: int) -> Iterator[RolloutBatch]:
        """The packed forwards of one epoch, in the order in which `update` runs them."""
        for mini in self.epochs[epoch]:
            for micro in mini:
                yield self.batch.select(micro)

    def mini_batches(self) -> Iterator[list[RolloutBatch]]:
        """For each optimizer step of each epoch, its micro-batches."""
        for epoch in self.epochs:
            for mini in epoch:
                yield [self.batch.select(micro) for micro in mini]

    def map_first_epoch(self, compute: Callable[[RolloutBatch], Ragged]) -> Ragged:
        """`compute` on each micro-batch of the first epoch, rows in that order."""
        return concat([compute(micro) for micro in self.micro_batches(epoch=0)])


@dataclass(frozen=True)
class ScheduledBatch:
    """A global batch and who computes what.

    Attributes:
        batch: the responses of the step.
        ranks: for each rank, indices into `batch` by epoch, mini-batch and micro-batch.
    """

    batch: RolloutBatch
    ranks: list[Epochs]

    def with_batch(self, batch: RolloutBatch) -> "ScheduledBatch":
        """The same schedule for the same responses with more fields."""
        return ScheduledBatch(batch, self.ranks)

    def shard(self, num_shards: int) -> list[RankBatch]:
        """What each rank receives; `num_shards` must be the number of ranks scheduled."""
        assert num_shards == len(self.ranks), (num_shards, len(self.ranks))
        return [self._rank_batch(epochs) for epochs in self.ranks]

    def _rank_batch(self, epochs: Epochs) -> RankBatch:
        used = sorted({i for epoch in epochs for mini in epoch for micro in mini for i in micro})
        local = {index: k for k, index in enumerate(used)}
        renamed = [[[[local[i] for i in m] for m in mini] for mini in epoch] for epoch in epochs]
        return RankBatch(self.batch.select(used), renamed)

    def join(self, results: Sequence[Ragged]) -> Ragged:
        """Per-rank results of `map_first_epoch` in the order of `batch`."""
        order = [i for epochs in self.ranks for mini in epochs[0] for micro in mini for i in micro]
        position = {index: k for k, index in enumerate(order)}
        return concat(results).select([position[i] for i in range(len(self.batch))])


def schedule(
    batch: RolloutBatch,
    *,
    num_ranks: int,
    mini_batch_size: int,
    epochs: int,
    max_tokens: int,
    seed: int,
    step: int,
) -> ScheduledBatch:
    """Draw mini-batches from `batch` and deal them to ranks and micro-batches.

    Args:
        batch: B responses; B must be a multiple of mini_batch_size.
        num_ranks: ranks that train; must divide mini_batch_size.
        mini_batch_size: responses per optimizer step, over all ranks.
        epochs: passes over the batch, each in an order of its own.
        max_tokens: budget of one micro-batch on one rank, prompt and response tokens. A single
            longer response is a micro-batch of its own.
        seed, step: with the epoch they determine the order.

    Raises:
        ValueError: the sizes do not divide.
    """
    if len(batch) % mini_batch_size or mini_batch_size % num_ranks:
        raise ValueError(
            f"{len(batch)} responses cannot be cut into mini-batches of {mini_batch_size} "
            f"for {num_ranks} ranks"
        )
    tokens = batch.num_tokens.tolist()
    ranks: list[Epochs] = [[] for _ in range(num_ranks)]
    for epoch in range(epochs):
        order = _shuffled(len(batch), seed, step, epoch)
        for rank in ranks:
            rank.append([])
        for start in range(0, len(order), mini_batch_size):
            mini = order[start : start + mini_batch_size]
            shares = balance(mini, tokens, num_ranks)
            for rank, micros in zip(ranks, _micro_batches(shares, tokens, max_tokens), strict=True):
                rank[-1].append(micros)
    return ScheduledBatch(batch, ranks)


def _shuffled(size: int, seed: int, step: int, epoch: int) -> list[int]:
    generator = torch.Generator().manual_seed(derive_seed(seed, "mini_batches", step, epoch))
    return torch.randperm(size, generator=generator).tolist()


def _micro_batches(
    shares: list[list[int]], tokens: Sequence[int], max_tokens: int
) -> list[list[list[int]]]:
    """Cut each rank's share into equally many micro-batches, each within the budget."""
    count = 1
    while True:
        cut = [balance(share, tokens, count) for share in shares]
        fits = all(
            len(micro) == 1 or sum(tokens[i] for i in micro) <= max_tokens
            for micros in cut
            for micro in micros
        )
        if fits or count == max(len(share) for share in shares):
            return cut
        count += 1
