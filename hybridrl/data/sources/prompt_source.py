"""Training prompts in the order in which they are drawn, behind one cursor."""

import hashlib
import json
import random
from array import array
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from itertools import count

from hybridrl.data.seeds import derive_seed
from hybridrl.data.sources.order import most_drawn, pacing, shares, shuffled, whole_weights
from hybridrl.data.sources.prompts import Prompt

# The one data set of prompts that name none.
ONE_SET: Mapping[str, float] = {"": 1.0}


class PromptSource:
    """An endless sequence of prompts, a pure function of seed and position, and a cursor in it.

    The data sets take turns by their weights (`order.shares`), and each goes through shuffled
    passes of its own (`order.shuffled`). How the sequence is cut into takes changes nothing in
    it; `position` is all that has to be kept to go on later.

    Args:
        prompts: of all data sets.
        distinct: any so many consecutive prompts differ, since a prompt's samples are seeded by
            step and prompt_id; the most that one step takes.
        seed: the run's.
        weights: data set -> its share of the prompts, relative to the others.
        curriculum: prompts over which the easiest problems are joined by the harder ones
            (`order.pacing`); 0: all are drawn from the start.

    Raises:
        ValueError: a data set has fewer prompts than may be drawn of it at a time.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        distinct: int,
        seed: int,
        weights: Mapping[str, float] = ONE_SET,
        curriculum: int = 0,
    ) -> None:
        self._weights = weights
        self._distinct = distinct
        self._seed = seed
        self._curriculum = curriculum
        self._members = {name: [p for p in prompts if p.dataset == name] for name in weights}
        for index, (name, members) in enumerate(self._members.items()):
            most = most_drawn(list(weights.values()), index, distinct)
            if not 0 < most <= len(members):
                of_set = f" of {name}" if name else ""
                raise ValueError(f"cannot draw {most} of {len(members)} prompts{of_set}")
        self._position = 0
        self._drawn = self._draw()

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """SHA-256 of what may be drawn, by data set, in order: `tokens` and ids of the prompts, and
        the `rows` that they are of, with all that rewards may look at, and their difficulty.
        """
        tokens, rows = hashlib.sha256(), hashlib.sha256()
        encode = json.JSONEncoder(sort_keys=True, default=str).encode
        for name, members in self._members.items():
            tokens.update(f"{name} {len(members)}\n".encode())
            for prompt in members:
                tokens.update(array("q", (prompt.prompt_id, *prompt.token_ids)).tobytes())
                tokens.update(b"\n")
                rows.update(encode((prompt.example, prompt.difficulty)).encode())
        return {"tokens": tokens.hexdigest(), "rows": rows.hexdigest()}

    @property
    def position(self) -> int:
        """How many prompts have been taken."""
        return self._position

    def take(self, number: int) -> list[Prompt]:
        """The next `number` prompts."""
        self._position += number
        return [next(self._drawn) for _ in range(number)]

    def seek(self, position: int) -> None:
        """Go on behind the first `position` prompts of the sequence, which is drawn up to there."""
        if position < 0:
            raise ValueError(f"positions count from 0; got {position}")
        if position < self._position:
            self._position = 0
            self._drawn = self._draw()
        self.take(position - self._position)

    def _draw(self) -> Iterator[Prompt]:
        turns = [self._of_set(name) for name in self._weights]
        for index in shares(list(self._weights.values())):
            yield next(turns[index])

    def _of_set(self, name: str) -> Iterator[Prompt]:
        """One data set's prompts, pass after pass."""
        members, weights = self._members[name], list(self._weights.values())
        index = list(self._weights).index(name)
        parts = whole_weights(weights)
        distinct = most_drawn(weights, index, self._distinct)
        length = Fraction(self._curriculum * parts[index], sum(parts))
        if self._curriculum:
            ties = self._permutation(len(members), "ties", name)
            members = sorted((members[i] for i in ties), key=lambda prompt: prompt.difficulty)
        # Without a mixture there is no name to tell orders apart by.
        what = ("epoch", name) if name else ("epoch",)
        passes = (self._permutation(len(members), *what, number) for number in count())
        order = shuffled(passes, distinct, pacing(len(members), distinct, length))
        return (members[problem] for problem in order)

    def _permutation(self, size: int, *what: int | str) -> list[int]:
        order = list(range(size))
        random.Random(derive_seed(self._seed, *what)).shuffle(order)
        return order
