"""Rollouts of chosen steps as JSONL, for reading and for other tools."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from hybridrl.trainer.tracking.best_effort_files import replace_file


@dataclass(frozen=True)
class RolloutRecord:
    """One response and what it was worth.

    Attributes:
        prompt_id: of the training prompt.
        prompt: as the model read it.
        question: as people read it.
        response: decoded, special tokens left out.
        answer: what was expected.
        score: reward before the KL penalty.
        length: tokens of the response, its end token included.
        failure: why the reward function failed, or None.
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
    """Write <run>/rollouts/step_<n>.jsonl, one response a line; returns its path.

    Raises:
        OSError: the disk does not take it; no part of it is left.
    """
    path = run_dir / "rollouts" / f"step_{step}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(asdict(record), ensure_ascii=False) + "\n" for record in records]
    return replace_file(path, lambda new: new.write_text("".join(lines), encoding="utf-8"))
