"""Mismatch of vLLM and trainer: log-probs of the sampled tokens, compared in every step."""

from collections.abc import Callable

import torch
from torch import Tensor

from hybridrl.algorithms.masked import masked_mean, on_mask
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.ragged import in_chunks
from hybridrl.trainer.errors import RunStopped

# Tokens without a difference that each engine's mean counts, too. With partial rollouts an engine
# may have two tokens of the present weights, and single tokens differ by many times the mean.
CALM_TOKENS = 100
METRICS = (
    "rollout/log_prob_diff_mean",
    "rollout/log_prob_diff_engine_max",
    "rollout/log_prob_diff_worst_engine",
    "rollout/log_prob_diff_max",
)


def check_rollout_log_probs(
    batch: RolloutBatch,
    mask: Tensor,
    *,
    limit: float,
    where: Callable[[int], str],
    part: str = "rollout engine",
    calm: int = CALM_TOKENS,
) -> dict[str, float | None]:
    """Compare rollout_log_probs with old_log_probs on the `current_tokens` of each engine.

    `limit` is the largest mean of an engine, nats per token; `where` names an engine's ranks, or
    whatever else `part` the batch is numbered by. The mean of n tokens is their sum / (n +
    `calm`).

    Returns:
        rollout/log_prob_diff_mean and rollout/log_prob_diff_max over all tokens and
        rollout/log_prob_diff_engine_max, the largest mean of an engine; nats. Also that engine's
        index, rollout/log_prob_diff_worst_engine. All are null if no token counts.

    Raises:
        RunStopped: the mean of an engine is above the limit, or NaN: stale weights.
    """
    if not mask.any():
        return dict.fromkeys(METRICS)
    compared = (batch.rollout_log_probs.values, batch.old_log_probs.values)
    difference = in_chunks(lambda rollout, trained: (rollout - trained).abs_(), *compared)
    sums, counts = _by_engine(batch, difference, mask)
    means = {k: sums[k] / (counts[k] + calm) for k in sums}
    wrong = {k: mean for k, mean in means.items() if not mean <= limit}  # NaN is wrong, too
    if wrong:
        versions = ", ".join(map(str, batch.weight_version.unique().tolist()))
        listed = "".join(
            f"\n  {part} {k} ({where(k)}): {sums[k] / counts[k]:.3g} nats per token in the "
            f"mean of {counts[k]} tokens"
            for k in wrong
        )
        raise RunStopped(
            f"rollout_log_probs and old_log_probs differ by more than trainer.max_log_prob_diff = "
            f"{limit:g} on {len(wrong)} of {len(means)} {part}s:{listed}\n"
            f"vLLM (weight version {versions}) does not sample from the actor's weights: the run "
            "would train on noise. (Between bfloat16 kernels 0.02 to 0.05 is usual.)"
        )
    values = (
        float(masked_mean(difference, mask)),
        max(means.values()),
        float(max(means, key=lambda k: means[k])),
        float(on_mask(difference, mask).max()),
    )
    return dict(zip(METRICS, values, strict=True))


def current_tokens(batch: RolloutBatch, version: int, *, keep_kv: bool) -> Tensor:
    """Return a mask of the tokens that weights `version` have sampled, [N] bool.

    With rollout.keep_kv, keys and values of earlier weights go into the log-probs of responses that
    have older tokens, so that none of their tokens counts.
    """
    mask = batch.response_mask.values
    is_current = mask & (batch.versions.values == version)
    if not keep_kv:
        return is_current
    older = batch.responses.like(mask & ~is_current).counts()
    return is_current & batch.responses.spread(older == 0)


def _by_engine(
    batch: RolloutBatch, difference: Tensor, mask: Tensor
) -> tuple[dict[int, float], dict[int, int]]:
    """Return the sum over the masked tokens of each engine that has any, and their number."""
    sampled = difference if bool(mask.all()) else difference.masked_fill(~mask, 0.0)
    of_rows = torch.segment_reduce(sampled, "sum", lengths=batch.responses.lengths)
    totals = torch.bincount(batch.engine, weights=of_rows.double())
    of_mask = batch.responses.like(mask).counts()
    counts = torch.bincount(batch.engine, weights=of_mask.double()).long()
    engines = counts.nonzero().flatten().tolist()
    return {k: float(totals[k]) for k in engines}, {k: int(counts[k]) for k in engines}


def adapter_share(batch: RolloutBatch, mask: Tensor) -> dict[str, float | None]:
    """Compute the share of the adapters' effect that appears in the log-probs of vLLM.

    sum (rollout - ref) (old - ref) / sum (old - ref)^2 over the `current_tokens`; ref is the model
    without adapters. The share is 1 if vLLM samples with the trainer's adapters, 0 if it
    samples without. While the policy has moved less than the kernels' rounding, it is 0.5 to 1.
    rollout/adapter_share is null without a reference, before the first update, and where no token
    is of these weights.
    """
    if "ref_log_probs" not in batch.added or not mask.any():
        return {"rollout/adapter_share": None}
    trained = batch.old_log_probs.values
    moved = trained - batch.ref_log_probs.values
    shown = moved + (batch.rollout_log_probs.values - trained)
    squares = masked_mean(moved.square(), mask)
    share = float(masked_mean(shown * moved, mask) / squares) if squares else None
    return {"rollout/adapter_share": share}
