"""Rollouts of some steps as JSONL."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from hybridrl.trainer.tracking.best_effort_files import replace_file


@dataclass(frozen=True)
class RolloutRecord:
    """Record of one response.

    Attributes:
        prompt_id: of the training prompt.
        prompt: with the chat template.
        question: without it.
        response: decoded, special tokens left out.
        answer: the expected one.
        score: reward before the KL penalty.
        length: tokens of the response, its end token included.
        failure: reason of a failed reward, or None.
    """

    prompt_id: int
    prompt: str
    question: str
    response: str
    answer: str
    score: float
    length: int
    failure: str | None = None


def write_rollouts(run_dir: Path, step: int, records: Iterable[RolloutRecord]) -> Path:
    """Write <run>/rollouts/step_<n>.jsonl, one response a line; return its path.

    Raises:
        OSError: the write failed; no partial file is left.
    """
    path = run_dir / "rollouts" / f"step_{step}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(asdict(record), ensure_ascii=False) + "\n" for record in records]
    return replace_file(path, lambda new: new.write_text("".join(lines), encoding="utf-8"))
