"""Filters of training problems: held-out problems, duplicates and few-shot examples."""

import random
from collections.abc import Collection, Iterable, Sequence

from hybridrl.data.seeds import derive_seed
from hybridrl.data.sources.rows import SourceProblem

# Normalised texts of a question: one per chat message, without system messages.
Question = tuple[str, ...]


def question_of(problem: SourceProblem) -> Question:
    """Return the question for comparisons, with white space and case normalised."""
    if isinstance(problem.prompt, str):
        texts = [problem.prompt]
    else:
        texts = [m["content"] for m in problem.prompt if m["role"] != "system"]
    return tuple(" ".join(text.split()).casefold() for text in texts)


def without(
    problems: Iterable[SourceProblem], questions: Collection[Question]
) -> list[SourceProblem]:
    """Return the problems whose question is not in `questions`."""
    return [problem for problem in problems if question_of(problem) not in questions]


def without_repeats(problems: Iterable[SourceProblem], seen: set[Question]) -> list[SourceProblem]:
    """Return the first problem of each question not in `seen`; add these questions to `seen`."""
    kept = []
    for problem in problems:
        question = question_of(problem)
        if question not in seen:
            seen.add(question)
            kept.append(problem)
    return kept


def choose_examples(
    problems: Sequence[SourceProblem], held_out: Collection[Question], number: int
) -> list[SourceProblem]:
    """Draw few-shot examples that are not held out, the same in every run; fewer if too few."""
    usable = without_repeats(problems, set(held_out))
    rng = random.Random(derive_seed("few_shot"))
    return rng.sample(usable, min(number, len(usable)))
