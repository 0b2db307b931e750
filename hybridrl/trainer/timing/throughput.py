"""Throughput of a step: tokens per second and MFU (model FLOPs utilization)."""

from collections.abc import Mapping
from dataclasses import dataclass

from hybridrl.config.planner.flops import forward_flops, training_flops
from hybridrl.config.planner.shape import ModelShape
from hybridrl.trainer.record import Observer, StepRecord

# Metrics of the batch: tokens of all responses with their prompts, and responses.
TOKENS, RESPONSES = "batch/tokens", "batch/responses"
# Tokens of these that one forward computes, and its operations in attention.
COMPUTED, ATTENTION = "batch/computed_tokens", "batch/attention_flops"

# Phases of one forward pass, and phases of `epochs` training passes. Only those of the policy have
# an MFU: the formula counts the head over the vocabulary.
FORWARDS = ("old_log_probs", "ref_log_probs", "values", "model_scores", "teacher_log_probs")
UPDATES = ("update_actor", "update_critic")
WITH_MFU = ("old_log_probs", "ref_log_probs", "update_actor")


@dataclass(frozen=True)
class Throughput(Observer):
    """Throughput of the phases of a step; an update passes `epochs` times over the batch.

    `peak` has the FLOP/s of all ranks together. Without `trains_all` only adapters are trained.
    """

    shape: ModelShape
    epochs: int
    peak: float | None
    trains_all: bool = True

    def after(self, record: StepRecord) -> StepRecord:
        """Add the throughput of the step's phases."""
        return record.adding(self.metrics(record.metrics))

    def metrics(self, step: Mapping[str, float | None]) -> dict[str, float | None]:
        """Compute tokens_per_s/<phase> and, with a known peak, mfu/<phase>, from a step's metrics.

        Tokens per second are those of the batch; FLOPs count tokens that sequences share once, and
        recomputed activations not at all. The time of an update includes its optimizer steps.
        """
        if TOKENS not in step:
            return {}
        tokens = int(step[TOKENS] or 0)
        computed = self.shape, step.get(COMPUTED) or 0, step.get(ATTENTION) or 0
        metrics: dict[str, float | None] = {}
        for phase in (*FORWARDS, *UPDATES):
            seconds = step.get(f"time/{phase}_s")
            if not seconds:
                continue
            passes = self.epochs if phase in UPDATES else 1
            metrics[f"tokens_per_s/{phase}"] = passes * tokens / seconds
            if phase in WITH_MFU and self.peak is not None:
                if phase in UPDATES:
                    done = passes * training_flops(*computed, trains_all=self.trains_all)
                else:
                    done = forward_flops(*computed)
                metrics[f"mfu/{phase}"] = done / seconds / self.peak
        return metrics
