"""AdamW with gradient clipping, and its learning-rate schedule."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from hybridrl.config.choices import LRSchedule, Offload
from hybridrl.config.schema import OptimConfig
from hybridrl.distributed.offload import offloadable_moments


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """Compute the learning rate of a training step; a pure function, for exact resume.

    Linear warm-up over the first warmup_steps steps, up to config.lr. Then constant, linear or
    cosine decay, from config.lr in the step after warm-up to config.lr * min_lr_ratio in the step
    after total_steps.

    Args:
        config: peak, schedule, warm-up and floor.
        step: counted from 1.
        total_steps: number of training steps of the run.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    done = (step - 1 - config.warmup_steps) / max(total_steps - config.warmup_steps, 1)
    done = min(done, 1.0)
    if config.schedule is LRSchedule.constant:
        remaining = 1.0
    elif config.schedule is LRSchedule.linear:
        remaining = 1.0 - done
    else:
        remaining = 0.5 * (1.0 + math.cos(math.pi * done))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * remaining)


class GradientStep(NamedTuple):
    """Result of an optimizer step: scalars on the device, equal on all ranks.

    Attributes:
        norm: global gradient norm before clipping.
        skipped: 1 if loss or norm was not finite and the step was skipped, else 0.
    """

    norm: Tensor
    skipped: Tensor


class Optimizer:
    """AdamW on sharded float32 master weights, with clipping by the global gradient norm.

    Args:
        model: model whose unfrozen parameters are trained.
        config: settings of AdamW, clipping and schedule.
        total_steps: number of training steps of the run.
        offload: place of the moments outside `on_device`.
    """

    def __init__(
        self, model: nn.Module, config: OptimConfig, total_steps: int, offload: Offload
    ) -> None:
        self.config = config
        self.total_steps = total_steps
        self.parameters = [param for param in model.parameters() if param.requires_grad]
        self.adamw = torch.optim.AdamW(
            self.parameters,
            lr=config.lr,
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.moments = offloadable_moments(self.adamw, offload, self.parameters[0].device)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Load the moments in the background at the start of the block, offload them at the end."""
        self.moments.onload()
        yield
        self.moments.offload()

    def set_step(self, step: int) -> float:
        """Set and return the learning rate of training step `step`, counted from 1."""
        lr = learning_rate(self.config, step, self.total_steps)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        return lr

    def gradient_norm(self) -> Tensor:
        """Compute the global gradient norm, a scalar on the device; a collective.

        Equal on all ranks up to rounding: replicas add in different orders.
        """
        norm = get_total_norm([param.grad for param in self.parameters if param.grad is not None])
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def apply_gradients(self, loss: Tensor) -> GradientStep:
        """Clip, take one step and clear the gradients; a collective over all ranks.

        If the norm or the loss of any rank is not finite, all ranks skip the step: weights and
        moments do not change. No synchronisation with the device: AdamW's kernel divides gradients
        by grad_scale and skips if found_inf is 1, the interface of torch.amp.GradScaler.

        Args:
            loss: scalar on the device, the sum of this rank's losses of the step.
        """
        norm = self.gradient_norm().float()
        skipped = torch.stack([norm, loss.float()]).isfinite().all().logical_not().float()
        # The loss can be NaN on one rank without a NaN in any gradient or the norm. The norm must
        # be bitwise equal on all ranks, or replicas of the weights would diverge.
        reduced = torch.stack([norm, skipped])
        dist.all_reduce(reduced, op=dist.ReduceOp.MAX)
        norm, skipped = reduced.unbind()
        self.adamw.grad_scale = (norm / self.config.max_grad_norm).clamp(min=1.0)
        self.adamw.found_inf = skipped
        self.moments.wait()
        self.adamw.step()
        self.adamw.zero_grad()
        return GradientStep(norm, skipped)

    def drop_gradients(self) -> None:
        """Clear the gradients without a step; weights and moments do not change."""
        self.moments.wait()
        self.adamw.zero_grad()

    def state_of(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Return AdamW's tensors as <kind>.<name>, kinds step, exp_avg and exp_avg_sq.

        Args:
            parameters: parameters by name; those without a step have no state.
        """
        return {
            f"{kind}.{name}": tensor
            for name, param in parameters.items()
            for kind, tensor in self.adamw.state.get(param, {}).items()
        }

    def expect_state(self, has_state: Mapping[nn.Parameter, bool]) -> None:
        """Allocate or drop AdamW's state, for a load of a checkpoint in place.

        Args:
            has_state: by parameter, True if it must have a state; new states are zero.
        """
        for param, expected in has_state.items():
            if not expected:
                self.adamw.state.pop(param, None)
            elif param not in self.adamw.state:
                values = param.detach()
                self.adamw.state[param] = {
                    "step": torch.zeros((), dtype=torch.float32, device=values.device),
                    "exp_avg": torch.zeros_like(values, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(values, memory_format=torch.preserve_format),
                }
