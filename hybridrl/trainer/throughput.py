"""How fast a step's tokens went through the model, per second and as a share of the peak (MFU)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hybridrl.config.flops import forward_flops, training_flops
from hybridrl.config.model_shape import ModelShape


class Work(NamedTuple):
    """What one forward over a step's batch covers.

    Attributes:
        tokens: of all responses and their prompts; a prompt counts with each of its responses.
        sequences: responses.
    """

    tokens: int
    sequences: int


# Phases that run every sequence forward once, and phases that train on each `epochs` times; the
# policy's have an MFU (a critic has no head over the vocabulary, which the formula counts).
FORWARDS = ("old_log_probs", "ref_log_probs", "values")
UPDATES = ("update_actor", "update_critic")
WITH_MFU = ("old_log_probs", "ref_log_probs", "update_actor")


@dataclass(frozen=True)
class Throughput:
    """Tokens per second and MFU of the phases of a step.

    Attributes:
        shape: the model's.
        epochs: passes of an update over the batch.
        peak: operations per second of all ranks together; None where unknown.
    """

    shape: ModelShape
    epochs: int
    peak: float | None

    def metrics(self, work: Work, seconds: Mapping[str, float]) -> dict[str, float]:
        """tokens_per_s/<phase> and, where the peak is known, mfu/<phase> (config/flops.py).

        The time of an update includes its optimizer steps; recomputed activations do not count as
        operations.

        Args:
            work: the step's batch.
            seconds: of each phase; those that did not run are left out.
        """
        metrics = {}
        for phase in (*FORWARDS, *UPDATES):
            if phase not in seconds or seconds[phase] <= 0:
                continue
            passes = self.epochs if phase in UPDATES else 1
            metrics[f"tokens_per_s/{phase}"] = passes * work.tokens / seconds[phase]
            if phase in WITH_MFU and self.peak is not None:
                count = training_flops if phase in UPDATES else forward_flops
                done = passes * count(self.shape, work.tokens, work.sequences)
                metrics[f"mfu/{phase}"] = done / seconds[phase] / self.peak
        return metrics
