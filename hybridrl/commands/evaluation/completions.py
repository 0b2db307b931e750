"""completions.jsonl: every response of an evaluation with its scores."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

COMPLETIONS = "completions.jsonl"
# Name of the training reward in files and tables.
REWARD = "reward"


@dataclass(frozen=True)
class Completion:
    """One response.

    Attributes:
        problem: id of the problem.
        sample: index among its samples.
        prompt: input text of the model.
        response: decoded, without special tokens.
        answer: the expected answer.
        scores: by rule; the training reward is "".
        length: tokens of the response, its end token included.
        truncated: true if a limit ended it.
    """

    problem: int
    sample: int
    prompt: str
    response: str
    answer: str
    scores: dict[str, float]
    length: int
    truncated: bool


class CompletionLog:
    """File of completions, appended after each pass; a context manager.

    Args:
        folder: existing.
        correct_at: smallest score of a correct response.
    """

    def __init__(self, folder: Path, correct_at: float) -> None:
        self._file = (folder / COMPLETIONS).open("w", encoding="utf-8")
        self._correct_at = correct_at

    def write(self, completions: Iterable[Completion]) -> None:
        """Append completions, one line each."""
        for completion in completions:
            row = asdict(completion)
            scores = {rule_name(rule): score for rule, score in completion.scores.items()}
            correct = {rule: score >= self._correct_at for rule, score in scores.items()}
            row |= {"scores": scores, "correct": correct}
            self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def rule_name(rule: str) -> str:
    """Return the name of a rule in files and tables."""
    return rule or REWARD
