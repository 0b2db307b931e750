"""vLLM's experts: the layout of their weights that a reshard can write; others are refused.

A backend may permute or pack w13 and w2 for its kernel after they are loaded. The reshard writes
the loader's layout, which Triton's kernel on GPUs reads. Kernels for CPUs pack, so there weights
stay as they were loaded, and plain torch computes. NAMES are the private names in use.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn
from torch.nn import functional as F

from hybridrl.config.errors import ConfigError
from hybridrl.config.planner.model_shape import model_shape
from hybridrl.models.resolve import read_model_config

NAMES: tuple[tuple[str, str], ...] = (
    (
        "vllm.model_executor.layers.fused_moe.experts.cpu_moe",
        "CPUUnquantizedExperts.process_weights_after_loading CPUUnquantizedExperts.apply",
    ),
)
# Name of vLLM's backend whose layout is the loader's.
BACKEND = "TRITON"
# Attribute of vLLM's layers on CPUs whose weights were kept.
KEPT = "hybridrl_kept"


@contextmanager
def experts_as_loaded(folder: Path, device_type: str) -> Iterator[dict[str, Any]]:
    """Within this context, an `LLM` of the model keeps its experts' weights as it loads them.

    Yields further arguments of `LLM`; without experts there are none.

    Raises:
        ConfigError: this vLLM has other kernels for CPUs.
    """
    if model_shape(read_model_config(str(folder))).experts is None:
        yield {}
        return
    if device_type == "cuda":
        yield {"moe_backend": "triton"}
        return
    try:
        from vllm.model_executor.layers.fused_moe.experts import cpu_moe

        kernel = cpu_moe.CPUUnquantizedExperts
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"model.path has experts, whose weights this vLLM packs on CPUs ({error}).\n"
            "Install the version of vLLM pinned in requirements/."
        ) from error
    with patch.object(kernel, "process_weights_after_loading", _keep_weights):
        yield {}


def check_experts(model: nn.Module) -> None:
    """Check that experts of a loaded model are as vLLM's loader wrote them.

    Raises:
        ConfigError: a backend may have changed them; names it.
    """
    for name, module in model.named_modules():
        if "w13_weight" not in dict(module.named_parameters(recurse=False)):
            continue
        method: Any = module.quant_method
        backends = (vars(method).get(name) for name in ("unquantized_backend", "fp8_backend"))
        names = [backend.name for backend in backends if backend is not None]
        backend = names[0] if names else type(method).__name__
        if backend != BACKEND and KEPT not in vars(module):
            raise ConfigError(
                f"vLLM computes {name} with {backend}, expected {BACKEND}: other backends permute "
                "or pack weights, which a weight sync would overwrite.\n"
                "Give your own `LLM` moe_backend=triton; in a run, unset environment variables "
                "that choose a backend (VLLM_USE_FLASHINFER_MOE_*, VLLM_ROCM_USE_AITER*)."
            )


def _keep_weights(kernel: Any, layer: nn.Module) -> None:
    """Replace the packing of vLLM's kernel for CPUs, and the kernel."""
    kernel.apply = partial(_weighted_sum, kernel)
    setattr(layer, KEPT, True)


def _product(states: Tensor, gate_function: Callable[[Tensor], Tensor]) -> Tensor:
    gate, up = states.chunk(2, dim=-1)
    return gate_function(gate) * up


def _clamped_product(states: Tensor) -> Tensor:
    """Return (up + 1) gate sigmoid(1.702 gate), both clamped at 7, of alternating gate and up."""
    gate, up = states[..., ::2].clamp(max=7.0), states[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * gate * (gate * 1.702).sigmoid()


# What vLLM computes between an expert's two matrices, by its name.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": partial(_product, gate_function=F.silu),
    "gelu_tanh": partial(_product, gate_function=partial(F.gelu, approximate="tanh")),
    "swigluoai": _clamped_product,
}


def _weighted_sum(
    kernel: Any,
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: Any,
    expert_map: Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    **rest: Any,
) -> None:
    """Write the weighted sum of each token's experts to `output`, [N, H].

    `w1` is [E, 2 I, H], gate and up; `w2` [E, H, I]; ids and weights are [N, K]. `expert_map` has
    the index of each expert of the layer in `w1` and `w2`, -1 if another rank holds it.
    """
    assert not apply_router_weight_on_input
    activate, biases = ACTIVATIONS[activation.value], (kernel.w1_bias, kernel.w2_bias)
    output.zero_()
    topk_ids = topk_ids if expert_map is None else expert_map[topk_ids]
    for expert in topk_ids[topk_ids >= 0].unique().tolist():
        token, choice = (topk_ids == expert).nonzero(as_tuple=True)
        first, second = (None if bias is None else bias[expert] for bias in biases)
        states = activate(F.linear(hidden_states[token], w1[expert], first))
        states = F.linear(states, w2[expert], second)
        weights = topk_weights[token, choice, None].to(states.dtype)
        output.index_add_(0, token, states * weights)
