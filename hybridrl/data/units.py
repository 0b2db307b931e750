"""Units of a mini-batch: responses that are computed together, as they share a prompt."""

from collections.abc import Sequence
from typing import NamedTuple

# Units that each rank has at least in a mini-batch, for its balance.
UNITS_PER_RANK = 2


class Rows(NamedTuple):
    """What rows of a batch take: index of the prompt, tokens, those of the response, cost."""

    prompts: Sequence[int]
    tokens: Sequence[int]
    of_response: Sequence[int]
    cost: Sequence[float]

    def size(self, unit: Sequence[int]) -> tuple[float, int]:
        """Return cost and tokens of rows that are computed together; an equal prompt is once."""
        cost, tokens = 0.0, 0
        for row, before in zip(unit, [None, *unit], strict=False):
            is_new = before is None or self.prompts[before] != self.prompts[row]
            own = self.tokens[row] if is_new else self.of_response[row]
            cost, tokens = cost + self.cost[row] * (own / self.tokens[row]), tokens + own
        return cost, tokens

    def by_prompt(self, order: Sequence[int], first: Sequence[int]) -> list[int]:
        """Return episodes in an order, but those of a prompt behind its first one."""
        groups: dict[int, list[int]] = {}
        for episode in order:
            groups.setdefault(self.prompts[first[episode]], []).append(episode)
        return [episode for group in groups.values() for episode in group]

    def units(self, rows: Sequence[int], num_shards: int, max_tokens: int) -> list[Sequence[int]]:
        """Cut rows into units of one prompt: within the token budget, and enough for all ranks."""
        most = max(1, len(rows) // (UNITS_PER_RANK * num_shards))
        units: list[list[int]] = []
        room = 0
        for row in rows:
            is_same = units and self.prompts[units[-1][0]] == self.prompts[row]
            if is_same and len(units[-1]) < most and self.of_response[row] <= room:
                units[-1].append(row)
                room -= self.of_response[row]
            else:
                units.append([row])
                room = max_tokens - self.tokens[row]
        return [*units]
