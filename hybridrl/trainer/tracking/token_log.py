"""Tokens of some responses of a step: which responses, and their Parquet file.

docs/records.md describes each column.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybridrl.config.sections import FunctionConfig
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.ragged import Ragged, in_chunks
from hybridrl.data.sources.tokenizer import Decode
from hybridrl.trainer.tracking.best_effort_files import replace_file

if TYPE_CHECKING:
    import pyarrow

# Below every log-prob of a token that can be sampled, and above those of others.
NO_LOG_PROB = -1e20
# Losses that cut the ratio of each token; GSPO cuts one ratio per response.
CUTTING = ("ppo_clip", "dual_clip", "clip_cov", "gspo")


def pick_rows(batch: RolloutBatch, scores: Sequence[float], count: int) -> list[int]:
    """Pick up to `count` responses, in ascending order.

    They are the best, the worst, the one with the token farthest from the reference, and others at
    even distances. Without a reference, vLLM's log-prob takes its place.
    """
    other = batch.ref_log_probs if "ref_log_probs" in batch.added else batch.rollout_log_probs
    log_probs, mask = batch.old_log_probs.values, batch.response_mask.values
    distance = in_chunks(distances, log_probs, other.values, mask)
    farthest = torch.tensor([row.max() for row in batch.responses.like(distance).views()])
    ranked = torch.tensor(scores)
    size = len(batch)
    spread = [k * size // count for k in range(count)]
    extremes = [int(ranked.argmax()), int(ranked.argmin()), int(farthest.argmax())]
    return sorted([*dict.fromkeys([*extremes, *spread, *range(size)])][:count])


def clipped(batch: RolloutBatch, log_probs: Tensor, loss: FunctionConfig) -> Tensor | None:
    """Return [N] bool, true where the loss has no gradient as the ratio left the clip range.

    `log_probs` [N] are the policy's after the update. None: the loss does not clip so.
    """
    if loss.function not in CUTTING:
        return None
    mask = batch.counted.values
    log_ratio = (log_probs - batch.old_log_probs.values).where(mask, 0.0)
    if loss.function == "gspo":
        sums = torch.segment_reduce(log_ratio, "sum", lengths=batch.responses.lengths)
        log_ratio = batch.responses.spread(sums / batch.counted.counts().clamp(min=1))
    ratio, advantages = log_ratio.exp(), batch.advantages.values
    above = (ratio > 1 + loss.args["clip_high"]) & (advantages > 0)
    below = (ratio < 1 - loss.args["clip_low"]) & (advantages < 0)
    if loss.function == "dual_clip":
        below |= (ratio > loss.args["max_ratio"]) & (advantages < 0)
    return (above | below) & mask


def token_table(
    batch: RolloutBatch, rows: Sequence[int], updated: Ragged, cut: Tensor | None, decode: Decode
) -> "pyarrow.Table":
    """Return one row per token of the responses `batch`, which are `rows` of the step.

    Args:
        updated: complex, the log-probs and entropies after the step's updates.
        cut: [N] bool, tokens with a clipped ratio; None: unknown.
        decode: token ids -> texts, special tokens included.
    """
    import pyarrow as pa

    count, ids, tensors = len(updated.values), batch.responses.values, batch.tensors()
    names = dict(zip(known := ids.unique().tolist(), decode([id] for id in known), strict=True))
    positions = [torch.arange(length) for length in batch.responses.lengths.tolist()]

    def array(values: Ragged | Tensor | None, kind: Any) -> pa.Array:
        flat = values.values if isinstance(values, Ragged) else values
        if flat is None:
            return pa.nulls(count, kind)
        # Tokens of images, which the policy never samples, have no log-prob.
        return pa.array(flat.numpy(), mask=(flat < NO_LOG_PROB).numpy()).cast(kind)

    sampled = batch.rollout_log_probs.values.numpy()
    whole = {
        "response": batch.responses.spread(torch.tensor(rows)),
        "position": torch.cat(positions),
        "token_id": ids,
    }
    numbers = {
        "old_log_prob": tensors["old_log_probs"],
        "ref_log_prob": tensors.get("ref_log_probs"),
        "teacher_log_prob": tensors.get("teacher_log_probs"),
        "new_log_prob": updated.values.real,
        "entropy": updated.values.imag,
        "advantage": tensors["advantages"],
        "value": tensors.get("values"),
        "return_": tensors.get("returns") if "values" in tensors else None,
    }
    return pa.table(
        {name: array(values, pa.int32()) for name, values in whole.items()}
        | {
            "token": pa.array([names[id] for id in ids.tolist()], pa.string()),
            "rollout_log_prob": pa.array(sampled, mask=~batch.response_mask.values.numpy()),
        }
        | {name: array(values, pa.float32()) for name, values in numbers.items()}
        | {
            "clipped": array(cut, pa.bool_()),
            "trained": array(batch.counted, pa.bool_()),
            "version": array(batch.versions, pa.int32()),
        }
    )


def write_tokens(run_dir: Path, step: int, table: "pyarrow.Table") -> Path:
    """Write <run>/tokens/step_<n>.parquet; return its path.

    Raises:
        OSError: the write failed; no partial file is left.
    """
    from pyarrow import parquet

    path = run_dir / "tokens" / f"step_{step}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    return replace_file(path, lambda new: parquet.write_table(table, new, compression="zstd"))


def distances(one: Tensor, other: Tensor, mask: Tensor) -> Tensor:
    """Return [N] absolute differences, 0 where the mask is false."""
    return (one - other).abs().where(mask, 0.0)
