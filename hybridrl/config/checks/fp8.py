"""Checks of rollout.weights = fp8: settings and models for which no sync can write such weights."""

from collections.abc import Iterator

from hybridrl.config.choices import Accelerator, DType, RolloutWeights
from hybridrl.config.errors import Problem, must_be
from hybridrl.config.planner.shape import ModelShape
from hybridrl.config.schema import RunConfig

KEY = "rollout.weights"


def fp8_problems(config: RunConfig, shape: ModelShape) -> Iterator[Problem]:
    """Find what FP8 weights of vLLM do not go with."""
    rollout = config.rollout
    if rollout.weights is not RolloutWeights.fp8:
        return
    for is_so, why in (
        (config.hardware.accelerator is not Accelerator.gpu, "its kernels need a GPU"),
        (rollout.exact, "with rollout.exact = true both sides compute with the same weights"),
        (
            any(kind.latent for kind in shape.kinds),
            "vLLM multiplies weights of latent attention into others, which no sync would update",
        ),
    ):
        if is_so:
            yield must_be("fp8", KEY, rollout.weights, RolloutWeights.dtype, why)
    if rollout.dtype is not DType.bfloat16:
        key, why = "rollout.dtype", f"{KEY} = fp8 quantises bfloat16, in which vLLM computes"
        yield must_be("fp8", key, rollout.dtype, DType.bfloat16, why)
