"""Experts of a mixture under FSDP2: their parameters, and the names these have in checkpoints.

Shapes:  N = tokens   E = experts of a layer   K = experts of a token   I = size of an expert
         H = hidden size

    gate_up_proj  [2 E, I, H]   gate and up projection of each expert, in turn; or
                  [E, 2 I, H]   if the checkpoint has them in one tensor
    down_proj     [E, H, I]

In memory gate_up_proj is transformers' [E, 2 I, H]. Cut along I, both parameters give each rank the
same part of every projection, which is what tensor parallelism needs. In a checkpoint each
projection of each expert is a tensor of its own, or all experts are one, perhaps transposed.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.integrations.moe import grouped_mm_experts_forward

from hybridrl.config.errors import ConfigError
from hybridrl.distributed.forward.routers import Choice, Router, ScaledRouter
from hybridrl.distributed.torch_compat import TorchDispatchMode, real_tensors, storage_id

GATE_UP, DOWN = ".experts.gate_up_proj", ".experts.down_proj"
# Names of routers beside `experts`, and of the buffer that is added to scores for the choice.
ROUTERS, OFFSET = ("gate", "router"), "e_score_correction_bias"


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
    layout = _layout(model)
    with _Places():
        fused = {name: _as_fused(name, tensor, *layout) for name, tensor in whole.items()}
        stored = revert_weight_conversion(model, fused)
    for name, tensor in stored.items():
        parameter = owner.get(storage_id(tensor.untyped_storage()))
        part = parameter and _part(name, tensor, parameter, whole[parameter])
        if not part:
            raise ConfigError(
                f"its checkpoint's {name} is no slice of a parameter: transformers computes "
                "it, which the trainer's loader and the weight sync do not"
            )
        held[part.parameter].append(part)
    return {name: sorted(parts, key=lambda part: part.at) for name, parts in held.items()}


class _Places(TorchDispatchMode):
    """Makes copies of tensors without data the tensors themselves: only places matter."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.clone.default:
            return torch.ops.aten.alias(args[0])
        return func(*args, **(kwargs or {}))


def _layout(model: nn.Module) -> tuple[bool, bool]:
    """Return whether transformers' experts are transposed, and whether gate and up are split."""
    own = next((module for module in model.modules() if isinstance(module, Experts)), None)
    return (False, True) if own is None else (own.is_transposed, own.splits)


def _as_fused(name: str, tensor: Tensor, transposed: bool, splits: bool) -> Tensor:
    """Return a parameter as transformers has it: gate and up of an expert are one matrix."""
    if name.endswith(GATE_UP) and splits:
        number, inner, hidden = tensor.shape
        tensor = tensor.view(number // 2, 2 * inner, hidden)
    return tensor.mT if transposed and name.endswith((GATE_UP, DOWN)) else tensor


def _part(name: str, tensor: Tensor, parameter: str, whole: Tensor) -> CheckpointTensor | None:
    """Return a checkpoint's tensor, if it is one index of the first dims of a parameter."""
    is_transposed = tensor.dim() > 1 and not tensor.is_contiguous()
    part = tensor.mT if is_transposed else tensor
    at = whole.dim() - part.dim()
    if at not in (0, 1) or part.shape != whole.shape[at:] or not part.is_contiguous():
        return None
    number, rest = divmod(int(part.storage_offset()), max(1, part.numel()))
    index = (number,) * at
    return None if rest else CheckpointTensor(name, tensor.shape, parameter, index, is_transposed)


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

    `fused` are transformers' experts, whose weights they share. Transposed ones have no data yet.
    `splits`: gate and up projection of an expert are matrices of their own, as in the checkpoint.
    """

    def __init__(self, fused: Any, *, splits: bool) -> None:
        super().__init__()
        self.is_transposed, self.splits = fused.is_transposed, splits
        self.has_bias = fused.has_bias
        up, down = fused.gate_up_proj.detach(), fused.down_proj.detach()
        if self.is_transposed:
            up, down = (weight.new_empty(weight.mT.shape) for weight in (up, down))
        if splits:
            up = up.view(-1, down.shape[2], down.shape[1])
        self.gate_up_proj, self.down_proj = nn.Parameter(up), nn.Parameter(down)
        if self.has_bias:
            self.gate_up_proj_bias = fused.gate_up_proj_bias
            self.down_proj_bias = fused.down_proj_bias
        gate = copy.copy(fused)  # with factors of its own, but no weights
        gate._parameters = {}
        self.apply_gate: Callable[[Tensor], Tensor] = gate._apply_gate

    def forward(self, states: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """Return [N, H], the weighted sum of each token's experts, from [N, H] and twice [N, K]."""
        return grouped_mm_experts_forward(_Fused(self), states, expert_ids, weights)  # type: ignore[arg-type]


class _Fused:
    """Experts with the attributes that `grouped_mm_experts_forward` reads."""

    has_gate, is_transposed, _is_expert_parallel = True, False, False

    def __init__(self, experts: Experts) -> None:
        self.num_experts, hidden, inner = experts.down_proj.shape
        self.gate_up_proj = experts.gate_up_proj.view(self.num_experts, 2 * inner, hidden)
        self.down_proj = experts.down_proj
        self.has_bias = experts.has_bias
        if self.has_bias:
            self.gate_up_proj_bias = experts.gate_up_proj_bias
            self.down_proj_bias = experts.down_proj_bias
        self._apply_gate = experts.apply_gate


def replace_experts(model: PreTrainedModel) -> None:
    """Replace the experts and routers of a transformers model, if it has some, by those here.

    Raises:
        ConfigError: they compute something else.
    """
    named = model.named_modules()
    owners = {name: module for name, module in named if "experts" in module._modules}
    config: dict[str, Any] = model.config.get_text_config().to_dict()
    choice, splits = None, False
    for path, owner in owners.items():
        name = next(name for name in ROUTERS if name in owner._modules)
        gate = owner.get_submodule(name)
        if choice is None:
            choice = _choice(gate, config)
            up = owner.get_parameter("experts.gate_up_proj").to("meta")
            splits = len(revert_weight_conversion(model, {f"{path}{GATE_UP}": up})) > 1
        setattr(owner, name, _router(gate, choice))
        owner.experts = Experts(owner.experts, splits=splits)


def _router(gate: nn.Module, choice: Choice) -> Router:
    """Return a router with the weights of transformers' one."""
    named, offset = dict(gate.named_parameters()), gate._buffers.get(OFFSET)
    if "per_expert_scale" in named:
        return ScaledRouter(gate, choice)
    return Router(named["weight"], choice, bias=named.get("bias"), offset=offset)


def _choice(gate: nn.Module, config: Mapping[str, Any]) -> Choice:
    """Return how a router chooses and weighs experts.

    Compares transformers' router with those here on random numbers.
    """
    with real_tensors():
        generator = torch.Generator().manual_seed(0)
        other = _random(gate, generator)
        hidden = next(param.shape[1] for param in other.parameters() if param.dim() > 1)
        # Logits of about 1: scores of large ones are 0 or 1, and equal.
        states = torch.randn(64, hidden, generator=generator) * hidden**-0.5
        with suppress(Exception):  # it returns other things, or wants more
            _, weights, ids = other(states)
            for choice in _choices(ids.shape[1], config):
                own = _router(other, choice)(states)
                if _equal(own[1:], (weights, ids)):
                    return choice
    raise ConfigError(
        f"its routers ({type(gate).__name__}) choose and weigh experts otherwise than by the "
        "softmax or sigmoids of a linear layer, the best of all or of groups"
    )


def _choices(top_k: int, config: Mapping[str, Any]) -> Iterator[Choice]:
    """Yield the rules that a router may have, given the numbers in config.json."""
    split = (config.get("n_group") or 1, config.get("topk_group") or 1)
    scales = (1.0, config.get("routed_scaling_factor") or 1.0)
    flags = (False, True)
    for normal, sigmoid, groups, scale in product(flags, flags, ((1, 1), split), scales):
        yield Choice(top_k, normal, sigmoid, groups[0], groups[1], scale)


def _equal(own: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Return whether weights and ids of experts are the same, in any order of a token's experts."""
    (weights, ids), (others, other_ids) = own, other
    order, other_order = ids.argsort(-1), other_ids.argsort(-1)
    return torch.equal(ids.gather(1, order), other_ids.gather(1, other_order)) and torch.allclose(
        weights.gather(1, order), others.gather(1, other_order)
    )


def _random(module: nn.Module, generator: torch.Generator) -> nn.Module:
    """Return a copy of a module, without data perhaps, with random parameters."""
    other = copy.copy(module)
    for held in ("_parameters", "_buffers", "_modules"):
        setattr(other, held, dict(vars(module)[held]))
    for name, param in module._parameters.items():
        if param is not None:
            drawn = torch.randn(param.shape, generator=generator)
            other._parameters[name] = nn.Parameter(drawn)
    for name, buffer in module.named_buffers(recurse=False):
        other._buffers[name] = torch.randn(buffer.shape, generator=generator)
    for name, part in module.named_children():
        other._modules[name] = _random(part, generator)
    return other
