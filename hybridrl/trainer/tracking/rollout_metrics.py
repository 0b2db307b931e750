"""What is known of a step's rollout as such: lengths, speeds, turns."""

from hybridrl.data.batch import Rollout, RolloutBatch
from hybridrl.trainer.multi_turn.environment import turn_metrics
from hybridrl.trainer.timing.engines import engine_metrics
from hybridrl.trainer.timing.throughput import RESPONSES, TOKENS


def rollout_metrics(rollout: Rollout, seconds: float) -> dict[str, float | None]:
    """Metrics of the responses, of the engines that wrote them, and of conversations.

    Args:
        rollout: of a step.
        seconds: that it took.
    """
    engines = engine_metrics(rollout.engines, seconds)
    return response_metrics(rollout.batch) | engines | turn_metrics(rollout)


def response_metrics(batch: RolloutBatch) -> dict[str, float | None]:
    """Tokens, responses and their lengths."""
    lengths = batch.responses.lengths.float()
    return {
        TOKENS: float(int(batch.prompts.lengths.sum()) + lengths.sum()),
        RESPONSES: float(len(lengths)),
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "response/truncated_fraction": float(batch.truncated.float().mean()),
    }
