"""Few-shot examples: solved problems shown before a question."""

import random
from collections.abc import Collection, Sequence

from hybridrl.data.seeds import derive_seed
from hybridrl.data.sources.filters import Question, without_repeats
from hybridrl.data.sources.rows import Message, SourceProblem


def choose_examples(
    problems: Sequence[SourceProblem], held_out: Collection[Question], number: int
) -> list[SourceProblem]:
    """Draw `number` examples, the same in every run; fewer if there are not enough.

    Args:
        problems: training problems.
        held_out: questions that must not be shown.
        number: of examples.
    """
    usable = without_repeats(problems, set(held_out))
    rng = random.Random(derive_seed("few_shot"))
    return rng.sample(usable, min(number, len(usable)))


def with_examples(messages: list[Message], examples: Sequence[SourceProblem]) -> list[Message]:
    """Insert examples as earlier turns after the system messages."""
    first = len(_system(messages))
    turns = [turn for example in examples for turn in _turns(example)]
    return [*messages[:first], *turns, *messages[first:]]


def _turns(example: SourceProblem) -> list[Message]:
    """Return a solved problem as a user turn and an assistant turn."""
    solution = {"role": "assistant", "content": example.solution or example.answer}
    if isinstance(example.prompt, str):
        return [{"role": "user", "content": example.prompt}, solution]
    return [*example.prompt[len(_system(example.prompt)) :], solution]


def _system(messages: list[Message]) -> list[Message]:
    """Return the system messages at the beginning."""
    others = [index for index, message in enumerate(messages) if message["role"] != "system"]
    return messages[: others[0]] if others else messages
