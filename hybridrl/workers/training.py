"""Optimizer steps of actor and critic over packed micro-batches: AdamW, schedule, metrics."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from hybridrl.config.choices import LRSchedule, Offload
from hybridrl.config.schema import FSDPConfig, OptimConfig
from hybridrl.data.batch import RolloutBatch, Totals
from hybridrl.distributed import position
from hybridrl.distributed.fsdp import begin_micro_batch
from hybridrl.distributed.offload import Offloadable


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """Compute the learning rate of a training step, counted from 1; pure, for exact resume.

    Linear warm-up over the first warmup_steps steps, up to config.lr. Then constant, linear or
    cosine decay, from config.lr in the step after warm-up to config.lr * min_lr_ratio in the step
    after total_steps.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    done = (step - 1 - config.warmup_steps) / max(total_steps - config.warmup_steps, 1)
    done = min(done, 1.0)
    remaining = {
        LRSchedule.constant: 1.0,
        LRSchedule.linear: 1.0 - done,
        LRSchedule.cosine: 0.5 * (1.0 + math.cos(math.pi * done)),
    }[config.schedule]
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * remaining)


class GradientStep(NamedTuple):
    """Norm before clipping, and 1 if not finite and thus skipped: device scalars, on all ranks."""

    norm: Tensor
    skipped: Tensor


class Optimizer:
    """AdamW on a model's unfrozen, sharded float32 weights, clipped by the global gradient norm.

    With `offload` AdamW's moments are on the host outside `on_device`.
    """

    def __init__(
        self, model: nn.Module, config: OptimConfig, total_steps: int, offload: Offload
    ) -> None:
        self.model = model
        self.config = config
        self.total_steps = total_steps
        self.parameters = [param for param in model.parameters() if param.requires_grad]
        self.device = self.parameters[0].device
        self.adamw = torch.optim.AdamW(
            self.parameters,
            lr=config.lr,
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.moments = Offloadable(self._moments, self.device, moves=offload is not Offload.none)

    def _moments(self) -> list[Tensor]:
        """Return AdamW's moments, which it allocates at its first step; step counts stay there."""
        kinds = ("exp_avg", "exp_avg_sq")
        return [state[kind] for state in self.adamw.state.values() for kind in kinds]

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Load the moments in the background at the start of the block, offload them at the end."""
        self.moments.onload()
        yield
        self.moments.offload()

    def set_step(self, step: int) -> None:
        """Set the learning rate of training step `step`, counted from 1."""
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate(self.config, step, self.total_steps)

    def gradient_norm(self) -> Tensor:
        """Compute the global gradient norm, a scalar on the device; a collective.

        Equal on all ranks up to rounding: replicas add in different orders.
        """
        norm = get_total_norm([param.grad for param in self.parameters if param.grad is not None])
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def apply_gradients(self, loss: Tensor, max_norm: float | None = None) -> GradientStep:
        """Clip, take one step and clear the gradients; a collective over all ranks.

        `max_norm` takes the place of the config's max_grad_norm.

        All ranks skip the step if the norm or the loss, a rank's sum over the step, is not finite
        on any of them. Then weights and moments do not change. No synchronisation with the device:
        AdamW's kernel divides gradients by grad_scale and skips if found_inf is 1, the interface of
        torch.amp.GradScaler.
        """
        norm = self.gradient_norm().float()
        skipped = torch.stack([norm, loss.float()]).isfinite().all().logical_not().float()
        # The loss can be NaN on one rank without a NaN in any gradient or the norm. The norm must
        # be bitwise equal on all ranks, or replicas of the weights would diverge.
        reduced = torch.stack([norm, skipped])
        dist.all_reduce(reduced, op=dist.ReduceOp.MAX)
        norm, skipped = reduced.unbind()
        self.adamw.grad_scale = (norm / (max_norm or self.config.max_grad_norm)).clamp(min=1.0)
        self.adamw.found_inf = skipped
        self.moments.wait()
        self.adamw.step()
        self.adamw.zero_grad()
        return GradientStep(norm, skipped)

    def drop_gradients(self) -> None:
        """Clear the gradients without a step; weights and moments do not change."""
        self.moments.wait()
        self.adamw.zero_grad()


@dataclass(frozen=True)
class LossStats:
    """Statistics of a loss on one micro-batch: detached scalars by name, on the device.

    Every rank must report the same names. Of `sums` over response tokens an update reports the
    means, of `maxima` the largest. A sum of shape [2] is a sum and its own count.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)


# (micro-batch, totals of the mini-batch over all ranks) -> loss, statistics. The loss is a sum over
# the micro-batch's tokens divided by the totals.
Loss = Callable[[RolloutBatch, Totals], tuple[Tensor, LossStats]]


class Training:
    """Optimizer steps of one update, and their statistics."""

    def __init__(self, optimizer: Optimizer, loss: Loss, fsdp: FSDPConfig) -> None:
        self.optimizer = optimizer
        self.loss = loss
        self.fsdp = fsdp
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
            zero = torch.zeros((), device=self.optimizer.device)
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
            begin_micro_batch(self.optimizer.model, self.fsdp, last=index == len(micros) - 1)
            loss, stats = self.loss(micro, totals)
            loss.backward()
            self.losses.append(loss.detach())
            for name, value in stats.sums.items():
                self.sums[name] = self.sums[name] + value if name in self.sums else value
            for name, value in stats.maxima.items():
                self.maxima[name] = torch.maximum(self.maxima.get(name, value), value)

    def report(self) -> dict[str, float]:
        """Compute the metrics of all steps, equal on all ranks; a collective.

        loss is a mean over mini-batches, sums become means over tokens, NaN without a counted one.
        grad_norm is the mean before clipping over steps taken, with 0 for mini-batches without a
        counted token; NaN if none was taken. skipped_steps had a non-finite loss or gradient;
        skipped_last of them are at the end.
        """
        position.at("metrics")
        num_tokens = self.num_tokens or math.nan
        total = torch.stack(self.losses).sum()
        # Ranks that share sequences all report the same tokens.
        shared = self.fsdp.ulysses_size
        parts = {"loss": total}
        for name, value in self.sums.items():
            own = {name: value[0], f"{name} of": value[1]} if value.dim() else {name: value}
            parts |= own
        everywhere = self._over_ranks(parts, dist.ReduceOp.SUM)
        sums = {name: value / shared for name, value in everywhere.items()}
        loss = sums.pop("loss") / len(self.steps)
        counts = {name: sums.get(f"{name} of", num_tokens) or math.nan for name in self.sums}
        norms = torch.stack([step.norm for step in self.steps]).tolist()
        skipped = [flag > 0 for flag in torch.stack([s.skipped for s in self.steps]).tolist()]
        taken = [norm for norm, skip in zip(norms, skipped, strict=True) if not skip]
        return {
            "loss": loss,
            **{name: sums[name] / count for name, count in counts.items()},
            **(self._over_ranks(self.maxima, dist.ReduceOp.MAX) if self.maxima else {}),
            "grad_norm": sum(taken) / len(taken) if taken else math.nan,
            "skipped_steps": float(sum(skipped)),
            "skipped_last": float(sum(1 for _ in takewhile(bool, reversed(skipped)))),
            "lr": self.optimizer.adamw.param_groups[0]["lr"],
        }

    def _over_ranks(
        self, values: Mapping[str, Tensor], op: dist.ReduceOp.RedOpType
    ) -> dict[str, float]:
        """Reduce scalars, of the same names in the same order on all ranks, in float64."""
        device = self.optimizer.device
        stacked = torch.stack(
            [torch.as_tensor(v).to(device, torch.float64) for v in values.values()]
        )
        dist.all_reduce(stacked, op=op)
        return dict(zip(values, stacked.tolist(), strict=True))
