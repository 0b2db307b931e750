"""Shards of weights, regions of tensors, and traces of a rollout engine's loader.

Shared by workers/, which have the shards, rollout/, which records traces, and reshard/.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from hybridrl.distributed.experts import GATE_UP, CheckpointTensor, Experts
from hybridrl.distributed.lora import (
    adapter_parameters,
    checkpoint_buffers,
    checkpoint_parameters,
)
from hybridrl.distributed.torch_compat import local_tensor


@dataclass(frozen=True)
class NamedShard:
    """Checkpoint tensor, cut along one dim over the dp_shard axis.

    Shard s belongs to rank s of the dp_shard group. Along dim 0 the cut is `torch.chunk`'s, as
    FSDP2's Shard(0). Shard s of n holds rows [s * ceil(rows / n), (s + 1) * ceil(rows / n)) that
    exist, perhaps none. Other dims are cut only where n divides them.

    Attributes:
        name: the parameter's name. Tied parameters appear under each name.
        shape: of the whole tensor.
        local: returns this rank's current shard: a contiguous float32 view without FSDP2's padding.
        dim: the dim that is cut.
        frozen: its content never changes.
    """

    name: str
    shape: tuple[int, ...]
    local: Callable[[], Tensor]
    dim: int = 0
    frozen: bool = False


def named_shards(root: nn.Module) -> list[NamedShard]:
    """Return this rank's shards of a TokenLogProbs; see `shards_of`."""
    free_gathered_weights(root)
    return shards_of(root.get_submodule("lm"))


def shards_of(lm: nn.Module) -> list[NamedShard]:
    """Return this rank's shards of a causal LM by parameter, tied duplicates included.

    With adapters these are frozen; A and B of each adapted layer follow as lora_A.weight and
    lora_B.weight. Last come the buffers of its checkpoint. The getters stay valid between forwards,
    while no weights are gathered.
    """
    factors = adapter_parameters(lm)
    named = [*checkpoint_parameters(lm, tied_twice=True), *factors.items()]
    mesh = named[0][1].device_mesh
    buffers = [
        NamedShard(name, tuple(buffer.shape), partial(_rows, lm, name, mesh), frozen=True)
        for name, buffer in checkpoint_buffers(lm).items()
    ]
    return [_shard(lm, *item) for item in named] + buffers


def _rows(lm: nn.Module, name: str, mesh: DeviceMesh) -> Tensor:
    """Return this rank's rows of a buffer, which all ranks have whole."""
    buffer = lm.get_buffer(name)
    size = -(-len(buffer) // mesh.size(-1))
    return buffer[size * mesh.get_local_rank(-1) :][:size]


def _shard(lm: nn.Module, name: str, param: nn.Parameter) -> NamedShard:
    """Return a parameter's shard; of transformers' own fused experts as of `Experts`."""
    frozen = not param.requires_grad
    dim, local = param.placements[-1].dim, partial(local_tensor, param)
    owner = lm.get_submodule(name.rpartition(".")[0]) if name.endswith(GATE_UP) else None
    if owner is None or isinstance(owner, Experts):
        return NamedShard(name, tuple(param.shape), local, dim, frozen)
    if dim or owner.is_transposed:
        raise ValueError(
            f"{name} is sharded along dim {dim}, transposed = {owner.is_transposed}: "
            "expected dim 0, its experts, and weights that are not transposed"
        )
    number, height, hidden = param.shape
    size = (-1, height // 2, hidden)
    shape = (2 * number, *size[1:])
    return NamedShard(name, shape, lambda: local().view(size), 0, frozen)


def free_gathered_weights(root: nn.Module) -> None:
    """Free all gathered weights of an FSDP2 root."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class Region(NamedTuple):
    """Hyper-rectangle of a tensor: [offset_d, offset_d + shape_d) in each dim d."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def rectangle(view: Tensor, whole: Tensor) -> Region | None:
    """Return the region of contiguous `whole` that `view` covers; None if it is no rectangle.

    A view with fewer dims lies at one index of the first ones.
    """
    for _ in range(whole.dim() - view.dim()):
        view = view.unsqueeze(0)
    steps = torch.empty(whole.shape, device="meta").stride()
    same = view.dim() == whole.dim() and whole.stride() == steps
    if not same or any(
        size > 1 and stride != step
        for size, stride, step in zip(view.shape, view.stride(), steps, strict=True)
    ):
        return None
    rest = view.storage_offset() - whole.storage_offset()
    offset = []
    for step in steps:
        offset.append(rest // step)
        rest %= step
    ends = (o + size for o, size in zip(offset, view.shape, strict=True))
    if rest or any(end > size for end, size in zip(ends, whole.shape, strict=True)):
        return None
    return Region(tuple(offset), tuple(view.shape))


def contains(whole: Tensor, view: Tensor) -> bool:
    """Return whether a contiguous tensor has all elements of a view of its storage."""
    start = view.storage_offset() - whole.storage_offset()
    last = start + sum((n - 1) * step for n, step in zip(view.shape, view.stride(), strict=True))
    same = whole.is_contiguous() and view.dtype == whole.dtype
    return same and start >= 0 and last < whole.numel()


class TracedCopy(NamedTuple):
    """Copy of a region of a trainer's parameter into a parameter of the engine, at `offset`.

    The region has as many dims as the engine's parameter.
    """

    source: str
    region: Region
    parameter: str
    offset: tuple[int, ...]

    @property
    def destination(self) -> Region:
        """Written region of the parameter."""
        return Region(self.offset, self.region.shape)


class TracedFill(NamedTuple):
    """Constant that the loader writes into a region of a parameter."""

    parameter: str
    region: Region
    value: float


# dtype of FP8 (e4m3) weights in traces and reshards: their bits, which collectives can send.
FP8 = torch.int8


class Trace(NamedTuple):
    """All writes of the loader on one rank.

    Attributes:
        copies, fills: in the loader's order.
        parameters: shape of each parameter of the engine's model, and of each buffer that the
            loader writes; also of each whole weight that is `gathered` for it.
        dtypes: of those that are not of the engine's dtype: float32, or `FP8`.
        scales: name of the tensor with the rows' scales, of each parameter that is FP8.
        loaded: tensors with which the loader does more than copy rectangles. Their parameters are
            gathered, and it loads them again after every move.
        computed: the engine's parameters that it writes so.
    """

    copies: list[TracedCopy]
    fills: list[TracedFill]
    parameters: dict[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype] = {}
    scales: Mapping[str, str] = {}
    loaded: tuple[CheckpointTensor, ...] = ()
    computed: frozenset[str] = frozenset()

    @property
    def tensors(self) -> list[str]:
        """Names of all tensors that a move writes."""
        return [*self.parameters, *self.scales.values()]


def gathered(source: str) -> str:
    """Return the name of a trainer's whole parameter among an engine's."""
    return f"{source} (gathered)"
