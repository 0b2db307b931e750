"""Experts of a mixture under FSDP2: their parameters, and the names these have in checkpoints.

Shapes:  N = tokens   E = experts of a layer   K = experts of a token   I = size of an expert
         H = hidden size

    gate_up_proj  [2 E, I, H]   gate and up projection of each expert, in turn
    down_proj     [E, H, I]

In memory gate_up_proj is transformers' [E, 2 I, H]. Cut along I, both parameters give each rank the
same part of every projection, which is what tensor parallelism needs. In a checkpoint each
projection of each expert is a tensor of its own.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.integrations.moe import grouped_mm_experts_forward

from hybridrl.config.errors import ConfigError
from hybridrl.distributed.forward.routing import Router
from hybridrl.distributed.torch_compat import TorchDispatchMode, real_tensors, storage_id

GATE_UP, DOWN = ".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"


class CheckpointTensor(NamedTuple):
    """Tensor of a Hugging Face checkpoint, and its place in the model.

    Attributes:
        name, shape: in the checkpoint.
        parameter: the parameter that holds it.
        at: its index in the first dims of the parameter; () if it is the whole.
        transposed: the parameter has the last two dims in the other order.
    """

    name: str
    shape: tuple[int, ...]
    parameter: str
    at: tuple[int, ...] = ()
    transposed: bool = False

    @property
    def held_shape(self) -> tuple[int, ...]:
        """Shape of its part of the parameter."""
        shape = self.shape
        return (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape

    def of(self, held: Tensor) -> Tensor:
        """Return the tensor as the view of its part of the parameter."""
        return held.transpose(-1, -2) if self.transposed else held


def checkpoint_tensors(
    model: PreTrainedModel, shapes: Mapping[str, Sequence[int]]
) -> dict[str, list[CheckpointTensor]]:
    """Return the tensors of a checkpoint that each parameter holds, in order.

    Those of transformers' own conversion, which runs on tensors without data: where a part of it
    lies in a parameter is its place there.

    Args:
        model: of transformers, perhaps without its head.
        shapes: of parameters, with `Experts`, by their names in the causal language model.

    Raises:
        ConfigError: a tensor of the checkpoint is more than a part of a parameter.
    """
    whole = {name: torch.empty(tuple(shape), device="meta") for name, shape in shapes.items()}
    owner = {storage_id(tensor.untyped_storage()): name for name, tensor in whole.items()}
    held: dict[str, list[CheckpointTensor]] = {name: [] for name in shapes}
    with _Places():
        stored = revert_weight_conversion(model, {n: _as_fused(n, t) for n, t in whole.items()})
    for name, tensor in stored.items():
        parameter = owner.get(storage_id(tensor.untyped_storage()))
        at = None if parameter is None else _index(tensor, whole[parameter])
        if parameter is None or at is None:
            raise ConfigError(
                f"its checkpoint's {name} is no slice of a parameter: transformers computes or "
                "transposes it, which the trainer's loader and the weight sync do not"
            )
        held[parameter].append(CheckpointTensor(name, tuple(tensor.shape), parameter, at))
    return {name: sorted(parts, key=lambda part: part.at) for name, parts in held.items()}


class _Places(TorchDispatchMode):
    """Makes copies of tensors without data the tensors themselves: only places matter."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.clone.default:
            return torch.ops.aten.alias(args[0])
        return func(*args, **(kwargs or {}))


def _as_fused(name: str, tensor: Tensor) -> Tensor:
    """Return a parameter as transformers has it: gate and up of an expert below each other."""
    if not name.endswith(GATE_UP):
        return tensor
    number, inner, hidden = tensor.shape
    return tensor.view(number // 2, 2 * inner, hidden)


def _index(part: Tensor, whole: Tensor) -> tuple[int, ...] | None:
    """Return the index in a parameter's first dims of what is a part of it; None if it is none."""
    at = whole.dim() - part.dim()
    if at not in (0, 1) or part.shape != whole.shape[at:] or not part.is_contiguous():
        return None
    number, rest = divmod(int(part.storage_offset()), max(1, part.numel()))
    return None if rest else (number,) * at


def parts_of(
    model: PreTrainedModel, parameters: Mapping[str, Tensor]
) -> dict[str, CheckpointTensor]:
    """Return the tensors of a checkpoint that parameters hold, by their names in the checkpoint."""
    held = checkpoint_tensors(model, {name: param.shape for name, param in parameters.items()})
    return {part.name: part for parts in held.values() for part in parts}


def parameter_shapes(tensors: Iterable[CheckpointTensor]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter that holds tensors, given all of a checkpoint."""
    shapes: dict[str, tuple[int, ...]] = {}
    for tensor in tensors:  # the last part of a parameter has the highest index
        shapes[tensor.parameter] = (*(index + 1 for index in tensor.at), *tensor.held_shape)
    return shapes


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


def replace_experts(model: PreTrainedModel) -> None:
    """Replace the experts and routers of a transformers model, if it has some, by those here.

    Raises:
        ConfigError: they compute something else.
    """
    mlps = [layer.mlp for layer in model.base_model.layers]
    mlps = [mlp for mlp in mlps if "experts" in dict(mlp.named_children())]
    if not mlps:
        return
    top_k, normalises = _choice(mlps[0].gate)
    for mlp in mlps:
        mlp.gate = Router(mlp.gate.weight, top_k, normalises=normalises)
        mlp.experts = Experts(mlp.experts)


def _choice(gate: nn.Module) -> tuple[int, bool]:
    """Return how many experts a router chooses, and whether their weights add up to 1.

    Compares transformers' router with the one here on random numbers.
    """
    with real_tensors():
        generator = torch.Generator().manual_seed(0)
        number, hidden = gate._parameters["weight"].shape  # type: ignore[union-attr]
        weight, states = (torch.randn(n, hidden, generator=generator) for n in (number, 64))
        other = copy.copy(gate)
        other._parameters = {"weight": nn.Parameter(weight)}
        with suppress(Exception):  # it returns other things, or wants more
            _, weights, ids = other(states)
            for normal in (False, True):
                own = Router(other._parameters["weight"], ids.shape[1], normalises=normal)(states)
                if torch.equal(own[2], ids) and torch.allclose(own[1], weights):
                    return ids.shape[1], normal
    raise ConfigError(
        f"its routers ({type(gate).__name__}) choose and weigh experts otherwise than by the "
        "softmax of a linear layer"
    )
