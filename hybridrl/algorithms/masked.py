"""Sums, means and variances over the true positions of a mask.

What stands off the mask is never read, not even NaN, and gets gradient 0.
"""

import torch
from torch import Tensor


def at_least_float32(values: Tensor) -> Tensor:
    """`values` in float32, or as they are if they are float64."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def check_same_shape(function: str, **tensors: Tensor) -> None:
    """Raise a ValueError that names the tensors unless all have one shape."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        found = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"{function} needs tensors of one shape; got {found}")


def check_mask(function: str, mask: Tensor) -> None:
    """Raise a ValueError unless `mask` is bool: an integer mask would index, not mask."""
    if mask.dtype != torch.bool:
        raise ValueError(f"{function} needs a bool mask; got {mask.dtype}")


def check_finite(function: str, mask: Tensor, **tensors: Tensor) -> None:
    """Raise a ValueError that names the tensor if one is NaN or infinite where `mask` is true."""
    for name, tensor in tensors.items():
        bad = ~torch.isfinite(tensor) & mask
        if bool(bad.any()):
            first = bad.nonzero()[0].tolist()
            raise ValueError(
                f"{function} needs finite {name}; {int(bad.sum())} of {int(mask.sum())} on the "
                f"mask are not, the first, {float(tensor[tuple(first)])}, at {first}"
            )


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of `values` where `mask` is true; 0 where it is true nowhere.

    Args:
        values: any shape.
        mask: the same shape, bool.

    Returns:
        Scalar, float32 (float64 for float64 values), in the unit of `values`.

    Raises:
        ValueError: the shapes differ, or the mask is not bool.
    """
    check_same_shape("masked_sum", values=values, mask=mask)
    check_mask("masked_sum", mask)
    return at_least_float32(values).masked_fill(~mask, 0.0).sum()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of `values` where `mask` is true, one number over all dims.

    Args:
        values: any shape.
        mask: the same shape, bool.

    Returns:
        Scalar, float32 (float64 for float64 values), in the unit of `values`.

    Raises:
        ValueError: the shapes differ, or the mask is not bool or true nowhere.
    """
    total = masked_sum(values, mask)
    count = int(mask.sum())
    if count == 0:
        raise ValueError(f"no mean over a mask of shape {tuple(mask.shape)} that is true nowhere")
    return total / count


def masked_whiten(values: Tensor, mask: Tensor, *, eps: float = 1.0e-8) -> Tensor:
    """`values` shifted and scaled to mean 0 and variance 1 over the mask; 0 off it.

    (x - mean) / sqrt(variance + eps), with one mean and variance over all dims. Values that are
    all equal, a single one among them, become 0.

    Args:
        values: any shape.
        mask: the same shape, bool.
        eps: keeps the division defined; in the squared unit of `values`.

    Returns:
        The shape of `values`, float32 (float64 for float64 values), without unit.

    Raises:
        ValueError: the shapes differ, the mask is not bool or true nowhere, or eps <= 0.
    """
    if not eps > 0:
        raise ValueError(f"masked_whiten needs eps > 0; got {eps=}")
    check_same_shape("masked_whiten", values=values, mask=mask)
    check_mask("masked_whiten", mask)
    values = at_least_float32(values)
    if bool(mask.any()):
        # Relative to one of them, equal values are exactly 0, whatever their mean rounds to.
        values = values - values.detach()[mask][0]
    centred = values - masked_mean(values, mask)
    variance = masked_mean(centred.square(), mask)
    return (centred * torch.rsqrt(variance + eps)).masked_fill(~mask, 0.0)
