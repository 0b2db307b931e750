"""Sums, means and whitening over the true positions of a mask; input checks of algorithms/.

Shapes:  values and masks have one shape, any
Masks:   bool; values off the mask, even NaN, have no effect and gradient 0
Returns: float32, or float64 for float64 values
Errors:  a ValueError if shapes differ or a mask is not bool
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Prevents division by 0; in the squared unit of the values.
WHITEN_EPS = 1.0e-8
# exp(20) = 5e8: larger than any useful ratio, far below float32's overflow at exp(88).
MAX_LOG_RATIO = 20.0


class WrongReturn(TypeError):
    """A user's estimator or loss returned something else than its contract says."""


def described(value: object) -> str:
    """Return the type of a function's result, with shapes and dtypes of tensors."""
    if isinstance(value, Tensor):
        return f"a Tensor of shape {tuple(value.shape)}, {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, tuple):
        return f"a tuple ({', '.join(described(part) for part in value)})"
    return "None" if value is None else f"a {type(value).__name__}"


def at_least_float32(values: Tensor) -> Tensor:
    """Convert to float32, except float64, which is returned unchanged."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def check_same_shape(function: str, **tensors: Tensor) -> None:
    """Raise a ValueError that names the tensors unless all have the same shape."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        given = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"{function} needs tensors of one shape; got {given}")


def check_masked(function: str, response_mask: Tensor, **tensors: Tensor) -> None:
    """Raise a ValueError unless all shapes are the mask's and the mask is bool.

    An integer tensor would index instead of mask.
    """
    check_same_shape(function, **tensors, response_mask=response_mask)
    if response_mask.dtype != torch.bool:
        raise ValueError(f"{function} needs a bool mask; got {response_mask.dtype}")


def check_finite(function: str, mask: Tensor, **tensors: Tensor) -> None:
    """Raise a ValueError that names the tensor if one is NaN or infinite where `mask` is true."""
    for name, tensor in tensors.items():
        if bool(tensor.sum().isfinite()):
            continue  # a finite sum has finite terms: one pass in the usual case
        bad = ~torch.isfinite(tensor) & mask
        if bool(bad.any()):
            first = bad.nonzero()[0].tolist()
            raise ValueError(
                f"{function} needs finite {name}; {int(bad.sum())} of {int(mask.sum())} on the "
                f"mask are not, the first, {float(tensor[tuple(first)])}, at {first}"
            )


def check_coef(function: str, coef: float) -> None:
    """Raise a ValueError unless a penalty's weight is finite and not negative."""
    if not (math.isfinite(coef) and coef >= 0):
        raise ValueError(f"{function} needs a finite coef >= 0; got {coef=}")


def on_mask(values: Tensor, mask: Tensor) -> Tensor:
    """Return `values[mask]` as a vector; a view if the mask is true everywhere."""
    if bool(mask.all()):
        return values.flatten()
    if values.requires_grad or values.is_cuda:
        return values[mask]
    # numpy is ten times as fast here.
    return torch.from_numpy(values.numpy()[mask.numpy()])


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum `values` over the mask; 0 if the mask is empty."""
    check_masked("masked_sum", mask, values=values)
    values = at_least_float32(values)
    return (values if bool(mask.all()) else values.masked_fill(~mask, 0.0)).sum()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Average `values` over the mask, over all dims; a ValueError if it is true nowhere."""
    total = masked_sum(values, mask)
    count = int(mask.count_nonzero())
    if count == 0:
        raise ValueError(f"no mean over a mask of shape {tuple(mask.shape)} that is true nowhere")
    return total / count


def masked_whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Shift and scale `values` to mean 0 and variance 1 over the mask; 0 off the mask.

    (x - mean) / sqrt(variance + WHITEN_EPS),   mean and variance (over N) over all dims

    Equal values become 0, and so does a single value. The mask is true somewhere.

    Source: advantage normalisation, Andrychowicz et al. 2020, https://arxiv.org/abs/2006.05990
    """
    return whiten_parts([values], [mask])[0]


def whiten_parts(parts: Sequence[Tensor], masks: Sequence[Tensor]) -> list[Tensor]:
    """Compute `masked_whiten` of a batch in parts, with one mean and variance over all parts."""
    for values, mask in zip(parts, masks, strict=True):
        check_masked("masked_whiten", mask, values=values)
    parts = [at_least_float32(values) for values in parts]
    count = sum(int(mask.count_nonzero()) for mask in masks)
    if count == 0:
        shapes = ", ".join(str(tuple(mask.shape)) for mask in masks)
        raise ValueError(f"masked_whiten over masks of shapes {shapes}, true nowhere")

    # Subtract one of the values first: equal values are then exactly 0 despite rounding.
    pairs = list(zip(parts, masks, strict=True))
    one = next(on_mask(values.detach(), mask)[0] for values, mask in pairs if mask.any())
    parts = [(values - one).masked_fill_(~mask, 0.0) for values, mask in pairs]
    mean = torch.stack([values.sum() for values in parts]).sum() / count
    for values, mask in zip(parts, masks, strict=True):
        values.sub_(mean).masked_fill_(~mask, 0.0)
    squares = torch.stack([values.square().sum() for values in parts]).sum()
    scale = torch.rsqrt(squares / count + WHITEN_EPS)
    return [values * scale for values in parts]
