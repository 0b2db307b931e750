"""Does vLLM sample from the weights that are trained? Compared on every step's tokens."""

import math

from torch import Tensor

from hybridrl.algorithms.masked import masked_mean
from hybridrl.data.batch import RolloutBatch


class RolloutMismatch(RuntimeError):
    """vLLM and the trainer disagree on the log-probs of the sampled tokens: weights are stale."""


def check_rollout_log_probs(
    batch: RolloutBatch, *, top_p: float, limit: float
) -> dict[str, float | None]:
    """Compare rollout_log_probs with old_log_probs on the sampled tokens.

    Args:
        batch: responses with both.
        top_p: what vLLM sampled from.
        limit: largest mean difference, nats per token.

    Returns:
        rollout/log_prob_diff_mean and rollout/log_prob_diff_max, nats.

    Raises:
        RolloutMismatch: the mean is above the limit, or NaN.
    """
    assert batch.old_log_probs is not None
    mask = batch.response_mask.values
    difference = log_prob_difference(
        batch.rollout_log_probs.values, batch.old_log_probs.values, top_p
    )
    mean = float(masked_mean(difference, mask))
    if not mean <= limit:  # NaN is no agreement either
        versions = ", ".join(map(str, batch.weight_version.unique().tolist()))
        raise RolloutMismatch(
            f"rollout_log_probs and old_log_probs differ by {mean:.3g} nats per token in the mean, "
            f"above trainer.max_log_prob_diff = {limit:g}. vLLM (weight version {versions}) does "
            "not sample from the actor's weights: training on would learn from noise. (Between "
            "bfloat16 kernels 0.02 to 0.05 is usual.)"
        )
    return {
        "rollout/log_prob_diff_mean": mean,
        "rollout/log_prob_diff_max": float(difference[mask].max()),
    }


def log_prob_difference(rollout: Tensor, trained: Tensor, top_p: float) -> Tensor:
    """How far the log-probs of sampled tokens disagree, [N] float32, nats, >= 0.

    Sampling from a nucleus raises the log-prob of what it keeps by up to -log(top_p), which is no
    disagreement: only what lies outside of [trained, trained - log(top_p)] counts.

    Args:
        rollout: [N] log-probs as vLLM reported them, of the distribution it sampled from.
        trained: [N] log-probs of the same tokens under the actor's whole distribution.
        top_p: probability mass of the nucleus; 1 is the whole distribution.
    """
    raised = rollout - trained
    return (raised - raised.clamp(0.0, -math.log(top_p))).abs()
