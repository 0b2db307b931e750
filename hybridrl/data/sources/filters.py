"""Filters of training problems: held-out problems and duplicates."""

from collections.abc import Collection, Iterable

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
