"""How fast a step's tokens went through the model, per second and as a share of the peak (MFU)."""

from collections.abc import Mapping
from dataclasses import dataclass

from hybridrl.config.planner.flops import forward_flops, training_flops
from hybridrl.config.planner.model_shape import ModelShape

# Metrics of the batch that a step computes on: tokens of all responses and of their prompts (a
# prompt counts with each of its responses), and responses.
TOKENS, RESPONSES = "batch/tokens", "batch/responses"

# Phases that run every sequence forward once, and phases that train on each `epochs` times; the
# policy's have an MFU (a critic or a reward model has no head over the vocabulary, which the
# formula counts).
FORWARDS = ("old_log_probs", "ref_log_probs", "values", "model_scores")
UPDATES = ("update_actor", "update_critic")
WITH_MFU = ("old_log_probs", "ref_log_probs", "update_actor")


@dataclass(frozen=True)
class Throughput:
    """Tokens per second and MFU of the phases of a step.

    Attributes:
        shape: the model's.
        epochs: passes of an update over the batch.
        peak: operations per second of all ranks together; None where unknown.
        trains_all: whether the actor trains all of its weights, and not adapters alone.
    """

    shape: ModelShape
    epochs: int
    peak: float | None
    trains_all: bool = True

    def metrics(self, step: Mapping[str, float | None]) -> dict[str, float | None]:
        """tokens_per_s/<phase> and, where the peak is known, mfu/<phase> (config/planner/flops.py).

        The time of an update includes its optimizer steps; recomputed activations do not count as
        operations.

        Args:
            step: metrics of a step; phases without a time, and steps without a batch, have no
                throughput.
        """
        if TOKENS not in step:
            return {}
        tokens, responses = int(step[TOKENS] or 0), int(step[RESPONSES] or 0)
        metrics: dict[str, float | None] = {}
        for phase in (*FORWARDS, *UPDATES):
            seconds = step.get(f"time/{phase}_s")
            if not seconds:
                continue
            passes = self.epochs if phase in UPDATES else 1
            metrics[f"tokens_per_s/{phase}"] = passes * tokens / seconds
            if phase in WITH_MFU and self.peak is not None:
                done = passes * self._operations(phase, tokens, responses)
                metrics[f"mfu/{phase}"] = done / seconds / self.peak
        return metrics

    def _operations(self, phase: str, tokens: int, responses: int) -> float:
        """Of one pass over the batch."""
        if phase in UPDATES:
            return training_flops(self.shape, tokens, responses, trains_all=self.trains_all)
        return forward_flops(self.shape, tokens, responses)
