"""Experts of a mixture under FSDP2: their parameters, and the names these have in checkpoints.

Shapes:  N = tokens   E = experts of a layer   K = experts of a token   I = size of an expert
         H = hidden size

    gate_up_proj  [2 E, I, H]   gate and up projection of each expert, in turn
    down_proj     [E, H, I]

In memory gate_up_proj is transformers' [E, 2 I, H]. Cut along I, both parameters give each rank the
same part of every projection, which is what tensor parallelism needs. In a checkpoint each
projection of each expert is a tensor of its own.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers.integrations.moe import grouped_mm_experts_forward

from hybridrl.config.planner.families import FAMILIES, Mixture
from hybridrl.distributed.forward.routing import Router

GATE_UP, DOWN = ".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"


class CheckpointTensor(NamedTuple):
    """Tensor of a Hugging Face checkpoint, and its place in the model.

    Attributes:
        name, shape: in the checkpoint.
        parameter: the parameter that holds it.
        at: its index in the first dims of the parameter; () if it is the whole.
    """

    name: str
    shape: tuple[int, ...]
    parameter: str
    at: tuple[int, ...] = ()


def checkpoint_tensors(
    parameter: str, shape: tuple[int, ...], mixture: Mixture | None
) -> Iterator[CheckpointTensor]:
    """Yield the tensors of a checkpoint that a parameter holds, in order."""
    shape = tuple(shape)
    if mixture is None or not parameter.endswith((GATE_UP, DOWN)):
        name = parameter.replace(".mlp.", f".{mixture.block}.") if mixture else parameter
        yield CheckpointTensor(name, shape, parameter)
        return
    *pair, down = mixture.parts
    parts = pair if parameter.endswith(GATE_UP) else [down]
    layer = parameter.partition(".mlp.")[0]
    for index in range(shape[0]):
        expert, part = divmod(index, len(parts))
        name = f"{layer}.{mixture.block}.experts.{expert}.{parts[part]}.weight"
        yield CheckpointTensor(name, shape[1:], parameter, (index,))


def parts_of(
    parameters: Mapping[str, Tensor], mixture: Mixture | None
) -> dict[str, CheckpointTensor]:
    """Return the tensors of a checkpoint that parameters hold, by their names in the checkpoint."""
    return {
        part.name: part
        for name, param in parameters.items()
        for part in checkpoint_tensors(name, param.shape, mixture)
    }


def parameter_shapes(tensors: Iterable[CheckpointTensor]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter that holds tensors, given all of a checkpoint."""
    shapes: dict[str, tuple[int, ...]] = {}
    for tensor in tensors:  # the last part of a parameter has the highest index
        shapes[tensor.parameter] = (*(index + 1 for index in tensor.at), *tensor.shape)
    return shapes


def mixture_of(model: nn.Module) -> Mixture | None:
    """Return the record of a transformers model's experts; None if it has none, or is unknown."""
    family = FAMILIES.get(model.config.model_type)
    return family.experts if family else None


def column_dim(parameter: str) -> int:
    """Return the dim along which `fsdp.columns` cuts a parameter."""
    return 2 if parameter.endswith(DOWN) else 1


class Experts(nn.Module):
    """Experts of a layer: transformers' computation with grouped matrix products.

    `fused` are transformers' experts, with [E, 2 I, H] and [E, H, I], whose weights they share.
    """

    def __init__(self, fused: Any) -> None:
        super().__init__()
        _, hidden, inner = fused.down_proj.shape
        self.gate_up_proj = nn.Parameter(fused.gate_up_proj.detach().view(-1, inner, hidden))
        self.down_proj = fused.down_proj
        self.act_fn = fused.act_fn

    def forward(self, states: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """Return [N, H], the weighted sum of each token's experts, from [N, H] and twice [N, K]."""
        return grouped_mm_experts_forward(_Fused(self), states, expert_ids, weights)  # type: ignore[arg-type]


class _Fused:
    """Experts with the attributes that `grouped_mm_experts_forward` reads."""

    has_gate, has_bias, is_transposed, _is_expert_parallel = True, False, False, False

    def __init__(self, experts: Experts) -> None:
        self.num_experts, hidden, inner = experts.down_proj.shape
        self.gate_up_proj = experts.gate_up_proj.view(self.num_experts, 2 * inner, hidden)
        self.down_proj = experts.down_proj
        self.act_fn = experts.act_fn

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up


def replace_experts(model: nn.Module) -> None:
    """Replace the experts and routers of a transformers model, if it has some, by those here."""
    mixture = mixture_of(model)
    if mixture is None:
        return
    config: dict[str, Any] = model.config.to_dict()
    normalises = mixture.norm_key is None or bool(config[mixture.norm_key])
    for layer in model.base_model.layers:
        layer.mlp.experts = Experts(layer.mlp.experts)
        top_k = config["num_experts_per_tok"]
        layer.mlp.gate = Router(layer.mlp.gate.weight, top_k, normalises=normalises)
