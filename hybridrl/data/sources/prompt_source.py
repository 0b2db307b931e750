"""Infinite stream of training prompts with a position to resume from."""

import hashlib
import json
import random
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from itertools import count, islice

from hybridrl.config.sections import DataConfig
from hybridrl.data.seeds import derive_seed
from hybridrl.data.sources.order import most_drawn, pacing, shares, shuffled, whole_weights
from hybridrl.data.sources.problem_sets import weights_of
from hybridrl.data.sources.prompts import Prompt, PromptSets

# Weights without a mixture: the data set's name is empty.
ONE_SET: Mapping[str, float] = {"": 1.0}


class PromptSource:
    """Infinite stream of prompts, a pure function of the seed, with a resumable position.

    Data sets alternate by weight (`order.shares`); each is shuffled anew every epoch
    (`order.shuffled`). `position` is the number of prompts taken.

    Args:
        prompts: of all data sets.
        distinct: length of windows in which all prompts differ; at least the prompts of a step,
            since sampling seeds derive from step and prompt_id.
        seed: of the run.
        weights: data set -> relative share of the prompts.
        curriculum: number of prompts over which harder problems are admitted (`order.pacing`); 0:
            all problems from the start.
        preferred: longer windows of data sets that have enough prompts for them.

    Raises:
        ValueError: a data set has fewer prompts than a window may contain of it.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        distinct: int,
        seed: int,
        weights: Mapping[str, float] = ONE_SET,
        curriculum: int = 0,
        preferred: int = 0,
    ) -> None:
        self._weights = list(weights.values())
        self._seed = seed
        self._curriculum = curriculum
        self._members = {name: [p for p in prompts if p.dataset == name] for name in weights}
        # Of each data set, the length of windows in which its prompts differ.
        self._distinct = []
        for index, (name, members) in enumerate(self._members.items()):
            lengths = max(preferred, distinct), distinct
            drawn = [most_drawn(self._weights, index, length) for length in lengths]
            fits = [most for most in drawn if 0 < most <= len(members)]
            if not fits:
                of_set = f" of {name}" if name else ""
                raise ValueError(f"cannot draw {drawn[-1]} of {len(members)} prompts{of_set}")
            self._distinct.append(fits[0])
        self.position = 0
        self._drawn = self._draw()

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """SHA-256 of all prompts in order.

        `tokens` hashes token ids, prompt ids and images; `rows` examples and difficulties.
        """
        tokens, rows = hashlib.sha256(), hashlib.sha256()
        encode = json.JSONEncoder(sort_keys=True, default=str).encode
        for name, members in self._members.items():
            tokens.update(f"{name} {len(members)}\n".encode())
            for prompt in members:
                tokens.update(array("q", (prompt.prompt_id, *prompt.token_ids)).tobytes())
                tokens.update(b"\n")
                tokens.update("".join(prompt.image_keys).encode())
                rows.update(encode((prompt.example, prompt.difficulty)).encode())
        return {"tokens": tokens.hexdigest(), "rows": rows.hexdigest()}

    def take(self, number: int) -> list[Prompt]:
        """Return the next `number` prompts."""
        self.position += number
        return [next(self._drawn) for _ in range(number)]

    def from_start(self) -> Iterator[Prompt]:
        """Return the prompts from the first on; the position stays."""
        return self._draw()

    def with_images(self, number: int) -> list[Prompt]:
        """Return the first prompts that have images, at most `number`; the position stays."""
        return list(islice((one for one in self._by_id.values() if one.images), number))

    def by_id(self, prompt_id: int) -> Prompt:
        """Return a prompt; KeyError if there is none."""
        return self._by_id[prompt_id]

    def after(self, prompt: Prompt) -> Prompt:
        """Return the next prompt by id that asks something else; after the last, the first ones."""
        ids = self._ids
        start = bisect_right(ids, prompt.prompt_id)
        others = (self._by_id[ids[(start + n) % len(ids)]] for n in range(len(ids)))
        asked = prompt.token_ids, prompt.image_keys
        return next((one for one in others if (one.token_ids, one.image_keys) != asked), prompt)

    @cached_property
    def _ids(self) -> list[int]:
        return sorted(self._by_id)

    @cached_property
    def _by_id(self) -> dict[int, Prompt]:
        return {p.prompt_id: p for members in self._members.values() for p in members}

    def _draw(self) -> Iterator[Prompt]:
        turns = [self._of_set(index, name) for index, name in enumerate(self._members)]
        for index in shares(self._weights):
            yield next(turns[index])

    def _of_set(self, index: int, name: str) -> Iterator[Prompt]:
        """Return the infinite stream of one data set's prompts."""
        members, distinct = self._members[name], self._distinct[index]
        parts = whole_weights(self._weights)
        length = Fraction(self._curriculum * parts[index], sum(parts))
        if self._curriculum:
            ties = self._permutation(len(members), "ties", name)
            members = sorted((members[i] for i in ties), key=lambda prompt: prompt.difficulty)
        # Without a mixture the name is empty and not part of the seed.
        what = ("epoch", name) if name else ("epoch",)
        passes = (self._permutation(len(members), *what, number) for number in count())
        order = shuffled(passes, distinct, pacing(len(members), distinct, length))
        return (members[problem] for problem in order)

    def _permutation(self, size: int, *what: int | str) -> list[int]:
        order = list(range(size))
        random.Random(derive_seed(self._seed, *what)).shuffle(order)
        return order


def prompt_source(
    prompts: PromptSets, config: DataConfig, seed: int, most: int | None = None
) -> PromptSource:
    """Return the training prompts in sampling order.

    The prompts of a step are distinct, and `most` in a row where the data sets have as many.
    """
    per_step = config.prompts_per_step
    curriculum = config.curriculum_steps * per_step if config.curriculum is not None else 0
    weights = weights_of(config)
    return PromptSource(prompts.train, per_step, seed, weights, curriculum, most or per_step)
