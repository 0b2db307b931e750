"""Training problems that are left out: held out as well, or there already."""

from collections.abc import Collection, Iterable

from hybridrl.data.sources.rows import SourceProblem

# The texts of a question: chat messages in a row, the system's left out.
Question = tuple[str, ...]


def question_of(problem: SourceProblem) -> Question:
    """What makes two problems the same: all that is asked, whatever its white space and case."""
    if isinstance(problem.prompt, str):
        texts = [problem.prompt]
    else:
        texts = [m["content"] for m in problem.prompt if m["role"] != "system"]
    return tuple(" ".join(text.split()).casefold() for text in texts)


def without(
    problems: Iterable[SourceProblem], questions: Collection[Question]
) -> list[SourceProblem]:
    """The problems that ask none of `questions`."""
    return [problem for problem in problems if question_of(problem) not in questions]


def without_repeats(problems: Iterable[SourceProblem], seen: set[Question]) -> list[SourceProblem]:
    """The problems whose question is not in `seen`, the first of each; `seen` takes them in."""
    kept = []
    for problem in problems:
        question = question_of(problem)
        if question not in seen:
            seen.add(question)
            kept.append(problem)
    return kept
