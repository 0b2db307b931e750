"""Rollouts of some steps: records, their JSONL, and samples to print."""

import json
from collections.abc import Iterable, Sequence, Set
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path

from hybridrl.config.command.secrets import without_secrets
from hybridrl.data.ragged import Ragged
from hybridrl.data.sources.prompts import Prompt
from hybridrl.trainer.rewarding import Rewarded
from hybridrl.trainer.tracking.best_effort_files import replace_text
from hybridrl.trainer.tracking.sinks import code_block


@dataclass(frozen=True)
class RolloutRecord:
    """Record of one response, with its reward before the KL penalty.

    `prompt` has the chat template, `question` has not. The length includes the end token.
    """

    prompt_id: int
    prompt: str
    question: str
    response: str
    answer: str
    score: float
    length: int
    failure: str | None = None


def rollout_records(
    prompts: list[Prompt], responses: Ragged, rewarded: Rewarded, secrets: Set[str]
) -> list[RolloutRecord]:
    """Build a step's records; secrets are hidden in reasons of failures."""
    reasons = {
        failure.index: without_secrets(f"{failure.kind}: {failure.reason}", secrets)
        for failure in rewarded.failures
    }
    rows = zip(prompts, rewarded.texts, rewarded.scores, responses.lengths.tolist(), strict=True)
    return [
        RolloutRecord(
            prompt_id=prompt.prompt_id,
            prompt=prompt.text,
            question=prompt.question,
            response=text,
            answer=str(prompt.example["answer"]),
            score=score,
            length=length,
            failure=reasons.get(index),
        )
        for index, (prompt, text, score, length) in enumerate(rows)
    ]


def write_rollouts(run_dir: Path, step: int, records: Iterable[RolloutRecord]) -> Path:
    """Write <run>/rollouts/step_<n>.jsonl, one response a line; return its path.

    Raises:
        OSError: the write failed; no partial file is left.
    """
    path = run_dir / "rollouts" / f"step_{step}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(asdict(record), ensure_ascii=False) + "\n" for record in records]
    return replace_text(path, "".join(lines))


def pick_samples(records: Sequence[RolloutRecord]) -> list[RolloutRecord]:
    """Pick the best and the worst response of a step, to different prompts; one if none differs."""
    if not records:
        return []

    def others(record: RolloutRecord) -> list[RolloutRecord]:
        return [other for other in records if other.prompt_id != record.prompt_id] or [record]

    score = attrgetter("score")
    best, worst = max(records, key=score), min(records, key=score)
    pairs = [(best, min(others(best), key=score)), (max(others(worst), key=score), worst)]
    best, worst = max(pairs, key=lambda pair: pair[0].score - pair[1].score)
    return [best] if best.score == worst.score else [best, worst]


def samples_text(records: Sequence[RolloutRecord]) -> str:
    """Format responses with their prompts and scores as Markdown."""
    return "\n".join(
        f"**score {record.score:g}, {record.length} tokens, expected {record.answer}**\n\n"
        f"{code_block(record.prompt)}\nresponse:\n\n{code_block(record.response)}"
        for record in records
    )
