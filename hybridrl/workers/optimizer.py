"""AdamW, its learning rate as a function of the step, and the clipped step itself."""

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
    """The learning rate of training step `step`; a pure function, so that runs can be resumed.

    It rises linearly over the first warmup_steps steps, the last of which has config.lr. Then it
    stays, or falls along a line or half a cosine, from config.lr in the step after warm-up to
    config.lr * min_lr_ratio, which the step after total_steps would have.

    Args:
        config: peak, schedule, warm-up and floor.
        step: counted from 1.
        total_steps: length of the run.
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
    """An optimizer step as scalars on the device, the same on all ranks.

    Attributes:
        norm: the gradients' global norm before clipping.
        skipped: 1 where loss or norm was not finite, so that no step was taken; else 0.
    """

    norm: Tensor
    skipped: Tensor


class Optimizer:
    """AdamW on sharded float32 master weights, with gradients clipped by their global norm.

    Args:
        model: its parameters are trained, but for those that are frozen.
        config: AdamW's settings, clipping and schedule.
        total_steps: length of the run.
        offload: where the moments lie outside `on_device`.
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
        """Have the moments come while the first gradient is computed, and go at the end."""
        self.moments.onload()
        yield
        self.moments.offload()

    def set_step(self, step: int) -> float:
        """Use the learning rate of training step `step`, counted from 1; return it."""
        lr = learning_rate(self.config, step, self.total_steps)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        return lr

    def gradient_norm(self) -> Tensor:
        """The gradients' global norm, a scalar on the device; collective.

        The same on all ranks but for rounding: each copy of the weights adds in its own order.
        """
        norm = get_total_norm([param.grad for param in self.parameters if param.grad is not None])
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def apply_gradients(self, loss: Tensor) -> GradientStep:
        """Clip, take one step and clear the gradients; a collective over all ranks.

        Where the gradients' norm or the loss of any rank is not finite, the gradients are dropped:
        weights and moments stay as they are, on all ranks. Nothing here waits for the device:
        AdamW's kernel divides gradients by grad_scale and does nothing where found_inf is 1, which
        is how torch.amp.GradScaler speaks to it.

        Args:
            loss: a scalar on the device: the sum of this rank's losses of the step.
        """
        norm = self.gradient_norm().float()
        skipped = torch.stack([norm, loss.float()]).isfinite().all().logical_not().float()
        # A loss can be NaN on one rank where no gradient is: nothing of it reaches the norm. The
        # norm's bits are made the same on all ranks, or copies of the weights would drift apart.
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
        """Clear the gradients without a step: weights and moments stay as they are."""
        self.moments.wait()
        self.adamw.zero_grad()

    def state_of(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """AdamW's own tensors, as <kind>.<name>: step, exp_avg and exp_avg_sq.

        Args:
            parameters: by name; those without a step yet have no state.
        """
        return {
            f"{kind}.{name}": tensor
            for name, param in parameters.items()
            for kind, tensor in self.adamw.state.get(param, {}).items()
        }

    def expect_state(self, has_state: Mapping[nn.Parameter, bool]) -> None:
        """Make or drop AdamW's state, so that a checkpoint's can be loaded into it.

        Args:
            has_state: whether a parameter is to have one; a new one is zero, as AdamW's first is.
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
