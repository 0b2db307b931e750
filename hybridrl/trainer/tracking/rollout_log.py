"""Rollouts of some steps and evaluations: records, their JSONL, and samples to print.

docs/records.md describes each field.
"""

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from io import BytesIO
from operator import attrgetter
from pathlib import Path
from typing import Any

from hybridrl.config.command.secrets import without_secrets
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.sources.images import ImageFile
from hybridrl.data.sources.prompts import Prompt
from hybridrl.data.sources.tokenizer import Decode
from hybridrl.trainer.record import RolloutRecord
from hybridrl.trainer.rewarding import Rewarded
from hybridrl.trainer.tracking.best_effort_files import replace_text
from hybridrl.trainer.tracking.tensorboard import code_block

# Longest side of an image, scaled down, in pixels.
THUMBNAIL = 192
# Role of the policy's turns, as in chat messages.
POLICY = "assistant"


def rollout_records(
    prompts: list[Prompt],
    batch: RolloutBatch,
    rewarded: Rewarded,
    secrets: Set[str],
    turns: Sequence[list[dict[str, str]] | None],
    read: Sequence[str],
) -> list[RolloutRecord]:
    """Build the records of responses; secrets are hidden in reasons of failures.

    `read` has what the model read before each one.
    """
    reasons = {
        failure.index: without_secrets(f"{failure.kind}: {failure.reason}", secrets)
        for failure in rewarded.failures
    }
    lengths, truncated = batch.responses.lengths.tolist(), batch.truncated.tolist()
    versions, parts = batch.weight_version.tolist(), rewarded.row_parts
    rows = zip(prompts, rewarded.texts, rewarded.scores, turns, read, strict=True)
    return [
        RolloutRecord(
            prompt_id=prompt.prompt_id,
            prompt=read_in_row,
            question=prompt.question,
            response=text,
            answer=prompt.answer,
            score=score,
            length=lengths[index],
            failure=reasons.get(index),
            truncated=truncated[index],
            parts=parts[index] if parts else {},
            turns=turns_of_row,
            weight_version=versions[index],
            images=[thumbnail_name(file) for file in prompt.images.files] if prompt.images else [],
        )
        for index, (prompt, text, score, turns_of_row, read_in_row) in enumerate(rows)
    ]


def conversations(batch: RolloutBatch, decode: Decode, role: str) -> list[list[dict[str, str]]]:
    """Return the turns of each response; those of the environment have the given role.

    Turns are told apart by the response mask: an empty answer joins the turns around it. An episode
    whose program failed before the model sampled anything has none.
    """
    turns: list[list[dict[str, str]]] = []
    ragged = batch.responses, batch.response_mask, batch.rollout_log_probs
    for tokens, mask, log_probs in zip(*(one.rows() for one in ragged), strict=True):
        if not mask.any() and not log_probs.any():
            turns.append([])
            continue
        ends = (mask[1:] != mask[:-1]).nonzero().flatten() + 1
        texts = decode(part.tolist() for part in tokens.tensor_split(ends))
        roles = [POLICY if part[0] else role for part in mask.tensor_split(ends)]
        pairs = zip(roles, texts, strict=True)
        turns.append([{"role": speaker, "text": text} for speaker, text in pairs])
    return turns


def write_rollouts(run_dir: Path, step: int, records: Iterable[RolloutRecord]) -> Path:
    """Write <run>/rollouts/step_<n>.jsonl, one response a line; return its path.

    Raises:
        OSError: the write failed; no partial file is left.
    """
    return _write(run_dir / "rollouts" / f"step_{step}.jsonl", (r.as_json() for r in records))


def write_evaluation(run_dir: Path, step: int, kinds: Mapping[str, list[RolloutRecord]]) -> Path:
    """Write <run>/rollouts/eval_step_<n>.jsonl as `write_rollouts`, with the kind of each."""
    lines = (r.as_json() | {"kind": kind} for kind, records in kinds.items() for r in records)
    return _write(run_dir / "rollouts" / f"eval_step_{step}.jsonl", lines)


def thumbnail_name(file: ImageFile) -> str:
    """Return the name of an image, scaled down, in <run>/images."""
    return f"{file.key[:16]}.jpg"


def write_thumbnails(run_dir: Path, prompts: Iterable[Prompt]) -> None:
    """Write the images of prompts, scaled down, to <run>/images, each once."""
    for file in {file.key: file for p in prompts if p.images for file in p.images.files}.values():
        path = run_dir / "images" / thumbnail_name(file)
        if not path.exists():
            image, content = file.open(), BytesIO()
            image.thumbnail((THUMBNAIL, THUMBNAIL))
            image.save(content, "JPEG", quality=80)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.getvalue())


def write_experts(run_dir: Path, step: int, shares: Iterable[list[float]]) -> Path:
    """Write <run>/experts/step_<n>.jsonl as `write_rollouts`, one layer a line."""
    rounded = [[round(share, 6) for share in layer] for layer in shares]
    lines = ({"layer": layer, "shares": row} for layer, row in enumerate(rounded))
    return _write(run_dir / "experts" / f"step_{step}.jsonl", lines)


def _write(path: Path, lines: Iterable[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return replace_text(path, "".join(json.dumps(x, ensure_ascii=False) + "\n" for x in lines))


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
        f"**score {record.score:g}, {record.length} tokens"
        + (f", expected {record.answer}**\n\n" if record.answer else "**\n\n")
        + f"{code_block(record.prompt)}\nresponse:\n\n{code_block(record.response)}"
        for record in records
    )
