"""First tokens that sequences share, and units of a mini-batch that are computed together.

A token's states depend on itself and those before it, so equal first tokens need to be computed
once: a prompt for its responses, the turns before a branch for the branches of an episode.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridrl.config.planner.flops import LEAST_SHARED, UNITS_PER_RANK
from hybridrl.data.ragged import Ragged

Tokens = NDArray[np.int32] | NDArray[np.int64]


def common(other: Tokens, row: Tokens) -> int:
    """Return how many first tokens of a row are the other's, if they are enough to be shared.

    The row's last token is always its own.
    """
    count, least = min(len(other), len(row) - 1), LEAST_SHARED * max(len(other), len(row))
    last = math.ceil(least) - 1
    if count < least or other[last] != row[last]:
        return 0  # most pairs end here, without a look at all their tokens
    differing = np.flatnonzero(other[:count] != row[:count])
    count = int(differing[0]) if len(differing) else count
    return count if count >= least else 0


def shared(rows: Sequence[Tokens]) -> list[tuple[int, int, int]]:
    """Return (row, other, count) of rows that share first tokens, others before the rows.

    `count` is the number of tokens. With no other before it a row shares more: in the order of
    their bytes that is the one just before.
    """
    order = sorted(range(len(rows)), key=lambda row: rows[row].tobytes())
    pairs = ((row, other, common(rows[other], rows[row])) for other, row in pairwise(order))
    return [(row, other, count) for row, other, count in pairs if count]


def whole_rows(prompts: Ragged, responses: Ragged) -> list[Tokens]:
    """Return prompt and response of each row."""
    return [np.concatenate(pair) for pair in zip(prompts.views(), responses.views(), strict=True)]


class Rows(NamedTuple):
    """Rows of a batch: length and cost of each by itself, the group of responses to one prompt.

    `tokens` are those of each row, if equal first tokens within a unit cost once; else empty.
    `answers` are the tokens of each row whose logits are computed, also if they are shared.
    `key_size` is the memory of a shared token's keys, which each row reads, over a token's.
    """

    lengths: Sequence[int]
    cost: Sequence[float]
    groups: Sequence[int]
    tokens: Sequence[Tokens]
    answers: Sequence[int] = ()
    key_size: float = 0.0

    def size(self, unit: Sequence[int]) -> tuple[float, int]:
        """Return the cost of rows that are computed together, and their memory in tokens."""
        own = [self.lengths[row] for row in unit]
        if not self.tokens:
            return sum(self.cost[row] for row in unit), sum(own)
        memory = own.copy()
        for place, _, count in shared([self.tokens[row] for row in unit]):
            own[place] -= count
            memory[place] = self._memory(unit[place], count)
        parts = [self.cost[r] * (n / self.lengths[r]) for r, n in zip(unit, own, strict=True)]
        return sum(parts), sum(memory)

    def _memory(self, row: int, count: int) -> int:
        """Return the memory, in tokens, of a row whose first `count` tokens are shared."""
        own = self.lengths[row] - count + math.ceil(self.key_size * count)
        return max(own, self.answers[row])

    def by_prompt(self, order: Sequence[int], first: Sequence[int]) -> list[int]:
        """Return episodes in an order, but those of a prompt behind its first one."""
        groups: dict[int, list[int]] = {}
        for episode in order:
            groups.setdefault(self.groups[first[episode]], []).append(episode)
        return [episode for group in groups.values() for episode in group]

    def units(self, rows: Sequence[int], num_shards: int, max_tokens: int) -> list[Sequence[int]]:
        """Cut rows into units of one prompt: within the token budget, and enough for all ranks."""
        if not self.tokens:
            return [[row] for row in rows]
        most = max(1, len(rows) // (UNITS_PER_RANK * num_shards))
        units: list[list[int]] = []
        room = 0
        for row in rows:
            own = self.lengths[row]
            if units and self.groups[units[-1][0]] == self.groups[row] and len(units[-1]) < most:
                new = self._memory(row, common(self.tokens[units[-1][-1]], self.tokens[row]))
                if new <= room:
                    units[-1].append(row)
                    room -= new
                    continue
            units.append([row])
            room = max_tokens - own
        return [*units]
