"""Which rank computes which responses of a mini-batch, and in which micro-batches.

A dealer gives every rank equally many micro-batches, none empty and each within the token budget
(a single longer response is one of its own). What is balanced depends on where ranks wait for each
other: FSDP2 gathers weights in every layer and, left to itself, again in every micro-batch.
"""

import math
import statistics
from collections.abc import Callable, Sequence

from hybridrl.config.choices import Accumulation
from hybridrl.config.schema import FSDPConfig
from hybridrl.data.balance import balance_totals, pack_evenly

Micros = list[list[int]]
# (mini-batch, cost by response, tokens by response, ranks, budget) -> each rank's micro-batches
Dealer = Callable[[list[int], Sequence[float], Sequence[int], int, int], list[Micros]]


def dealer_for(fsdp: FSDPConfig) -> Dealer:
    """The dealer for a sharding spec.

    Where weights stay gathered after forward and gradients add up unsharded, or nothing is sharded,
    only the first forward and the last backward of an optimizer step communicate
    (distributed/accumulation.py), so that ranks wait for each other's totals; else in every
    micro-batch.
    """
    whole = not fsdp.reshard_after_forward and fsdp.accumulation is Accumulation.full
    apart = whole or fsdp.dp_shard == 1
    return deal_totals if apart else deal_turns


def deal_turns(
    mini: list[int],
    cost: Sequence[float],
    tokens: Sequence[int],
    num_ranks: int,
    max_tokens: int,
) -> list[Micros]:
    """As few micro-batches as possible, of which the ranks' k-th ones cost nearly the same.

    These are neighbours in the order of cost, most expensive first. The direction in which the
    ranks are served alternates.
    """
    count = _fewest(mini, tokens, num_ranks, max_tokens)
    micros = None
    while micros is None:
        micros = pack_evenly(mini, cost, tokens, num_ranks * count, max_tokens)
        count += 1
    micros.sort(key=lambda micro: -_sum(cost, micro))
    ranks: list[Micros] = [[] for _ in range(num_ranks)]
    for k, micro in enumerate(micros):
        turn, place = divmod(k, num_ranks)
        ranks[place if turn % 2 == 0 else num_ranks - 1 - place].append(micro)
    return ranks


def deal_totals(
    mini: list[int],
    cost: Sequence[float],
    tokens: Sequence[int],
    num_ranks: int,
    max_tokens: int,
) -> list[Micros]:
    """Ranks of nearly equal total cost, each packed into as few micro-batches as all ranks need.

    A response of unusual length then delays nobody. Ranks still meet in the first forward and in
    the last backward: there each has micro-batches of about the usual cost.
    """
    count = _fewest(mini, tokens, num_ranks, max_tokens)
    while True:
        parts = balance_totals(mini, cost, num_ranks, at_least=count)
        packed = [pack_evenly(part, cost, tokens, count, max_tokens) for part in parts]
        ranks = [micros for micros in packed if micros is not None]
        if len(ranks) == num_ranks:
            usual = statistics.median(_sum(cost, micro) for micros in ranks for micro in micros)
            return [_usual_at_both_ends(micros, cost, usual) for micros in ranks]
        count += 1


def _usual_at_both_ends(micros: Micros, cost: Sequence[float], usual: float) -> Micros:
    """The same, the nearest to the usual cost last, where backwards meet, the next one first."""
    nearest, *rest = sorted(micros, key=lambda micro: abs(_sum(cost, micro) - usual))
    return [*rest, nearest]


def _fewest(mini: list[int], tokens: Sequence[int], num_ranks: int, max_tokens: int) -> int:
    """Micro-batches per rank that no packing can undercut; with one response each, all fits."""
    least = sum(min(tokens[i], max_tokens) for i in mini) / (num_ranks * max_tokens)
    return min(math.ceil(least), len(mini) // num_ranks)


def _sum(cost: Sequence[float], micro: list[int]) -> float:
    return sum(cost[i] for i in micro)
