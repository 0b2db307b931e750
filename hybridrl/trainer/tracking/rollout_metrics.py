"""Metrics of a step's rollout: lengths, speeds, turns."""

from hybridrl.data.batch import Rollout, RolloutBatch
from hybridrl.trainer.timing.engines import engine_metrics
from hybridrl.trainer.timing.throughput import RESPONSES, TOKENS


def rollout_metrics(rollout: Rollout, seconds: float) -> dict[str, float | None]:
    """Compute metrics of the responses, the engines and the turns.

    Args:
        rollout: of a step.
        seconds: that it took.
    """
    engines = engine_metrics(rollout.engines, seconds)
    return response_metrics(rollout.batch) | engines | turn_metrics(rollout)


def response_metrics(batch: RolloutBatch) -> dict[str, float | None]:
    """Count tokens, responses and their lengths."""
    lengths = batch.responses.lengths.float()
    return {
        TOKENS: float(int(batch.prompts.lengths.sum()) + lengths.sum()),
        RESPONSES: float(len(lengths)),
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "response/truncated_fraction": float(batch.truncated.float().mean()),
    }


def turn_metrics(rollout: Rollout) -> dict[str, float]:
    """Compute metrics of multi-turn responses; none without an environment."""
    batch = rollout.batch
    if batch.turns is None:
        return {}
    turns = batch.turns.float()
    return {
        "rollout/turns_mean": float(turns.mean()),
        "rollout/turns_max": float(turns.max()),
        "environment/tokens_mean": float((~batch.response_mask.values).sum()) / len(batch),
        "environment/seconds": rollout.environment_s,
    }
