"""completions.jsonl: every response of an evaluation and what it was worth."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

COMPLETIONS = "completions.jsonl"
# What the rule of training is called in files and tables.
REWARD = "reward"


@dataclass(frozen=True)
class Completion:
    """One response.

    Attributes:
        problem: id of the problem.
        sample: index among its samples.
        prompt: as the model read it.
        response: decoded, special tokens left out.
        answer: what was expected.
        scores: by rule; training's has the name "".
        length: tokens of the response, its end token included.
        truncated: whether a limit ended it.
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
    """The file of completions, which grows pass by pass. A context manager closes itself.

    Args:
        folder: existing.
        correct_at: the score from which a response is correct.
    """

    def __init__(self, folder: Path, correct_at: float) -> None:
        self._file = (folder / COMPLETIONS).open("w", encoding="utf-8")
        self._correct_at = correct_at

    def write(self, completions: Iterable[Completion]) -> None:
        """Add some, a line each."""
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
    """What readers call a rule; training's has no name of its own."""
    return rule or REWARD
