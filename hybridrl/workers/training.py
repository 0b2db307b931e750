"""Optimizer steps of actor and critic over packed micro-batches, and their metrics."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import torch
from torch import Tensor, nn

from hybridrl.config.schema import FSDPConfig
from hybridrl.data.batch import RolloutBatch, Totals
from hybridrl.distributed import position
from hybridrl.distributed.collectives import max_over_ranks, sum_over_ranks
from hybridrl.distributed.gathering import begin_micro_batch
from hybridrl.workers.optimizer import GradientStep, Optimizer


@dataclass(frozen=True)
class LossStats:
    """Statistics of a loss on one micro-batch: detached scalars by name, on the device.

    Every rank must report the same names.

    Attributes:
        sums: over response tokens; an update reports their means.
        maxima: over response tokens; an update reports the largest.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)


# (micro-batch, totals of the mini-batch over all ranks) -> loss, statistics
Loss = Callable[[RolloutBatch, Totals], tuple[Tensor, LossStats]]


class Training:
    """Optimizer steps of one update, and their statistics.

    Args:
        model: the FSDP2 root.
        optimizer: optimizer of its parameters.
        loss: loss function: a sum over a micro-batch's tokens divided by the given totals.
        device: device of the model.
        fsdp: its sharding spec.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Loss,
        device: torch.device,
        fsdp: FSDPConfig,
    ) -> None:
        self.model = model
        self.fsdp = fsdp
        self.optimizer = optimizer
        self.loss = loss
        self.device = device
        self.num_tokens = 0
        self.losses: list[Tensor] = []
        self.sums: dict[str, Tensor] = {}
        self.maxima: dict[str, Tensor] = {}
        self.steps: list[GradientStep] = []

    def take_step(self, micros: Sequence[RolloutBatch], totals: Totals) -> None:
        """Take one optimizer step on a mini-batch; a collective over all ranks.

        A mini-batch without a counted token takes none: momentum and weight decay would still
        change the weights.
        """
        before = len(self.losses)
        self.accumulate_gradients(micros, totals)
        position.at("optimizer step", len(self.steps) + 1)
        if totals.tokens:
            loss = torch.stack(self.losses[before:]).sum()
            self.steps.append(self.optimizer.apply_gradients(loss))
        else:
            self.optimizer.drop_gradients()
            zero = torch.zeros((), device=self.device)
            self.steps.append(GradientStep(norm=zero, skipped=zero))

    def accumulate_gradients(self, micros: Sequence[RolloutBatch], totals: Totals) -> None:
        """Accumulate the gradient of a mini-batch, independent of its split into micro-batches.

        Each micro-batch's loss is a sum over its tokens, divided by totals of the whole mini-batch
        on all ranks; FSDP2 sums over ranks.
        """
        self.num_tokens += totals.tokens
        # A mini-batch without a single token has gradient 0, not NaN.
        totals = Totals(*(max(count, 1) for count in totals))
        part = f"mini-batch {len(self.steps) + 1}, micro-batch"
        for index, micro in enumerate(micros):
            position.at(part, index + 1, len(micros))
            begin_micro_batch(self.model, self.fsdp, last=index == len(micros) - 1)
            loss, stats = self.loss(micro, totals)
            loss.backward()
            self._remember(loss.detach(), stats)

    def report(self) -> dict[str, float]:
        """Compute the metrics of all steps, equal on all ranks; a collective.

        Returns:
            loss: mean over mini-batches. Sums: means over tokens. Maxima: the largest.
            grad_norm: mean before clipping over steps taken, with 0 for mini-batches without a
            counted token; NaN if none was taken. skipped_steps: number of steps with non-finite
            loss or gradient. skipped_last: number of skipped steps at the end, in a row.
        """
        position.at("metrics")
        total = torch.stack(self.losses).sum()
        # Ranks that share sequences all report the same tokens.
        shared = self.fsdp.ulysses_size
        everywhere = sum_over_ranks({"loss": total, **self.sums}, self.device)
        sums = {name: value / shared for name, value in everywhere.items()}
        loss = sums.pop("loss") / len(self.steps)
        norms = torch.stack([step.norm for step in self.steps]).tolist()
        skipped = [flag > 0 for flag in torch.stack([s.skipped for s in self.steps]).tolist()]
        taken = [norm for norm, skip in zip(norms, skipped, strict=True) if not skip]
        return {
            "loss": loss,
            **{name: value / max(self.num_tokens, 1) for name, value in sums.items()},
            **(max_over_ranks(self.maxima, self.device) if self.maxima else {}),
            "grad_norm": sum(taken) / len(taken) if taken else math.nan,
            "skipped_steps": float(sum(skipped)),
            "skipped_last": float(sum(1 for _ in takewhile(bool, reversed(skipped)))),
        }

    def _remember(self, loss: Tensor, stats: LossStats) -> None:
        self.losses.append(loss)
        for name, value in stats.sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        for name, value in stats.maxima.items():
            known = self.maxima.setdefault(name, value)
            self.maxima[name] = torch.maximum(known, value)
