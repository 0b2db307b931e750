"""Shards of weights, regions of tensors, and traces of a rollout engine's loader.

Shared by workers/, which have the shards, rollout/, which records traces, and reshard/.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from hybridrl.distributed.experts import GATE_UP, Experts
from hybridrl.distributed.lora import adapter_parameters, checkpoint_parameters
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
    lora_B.weight. The getters stay valid between forwards, while no weights are gathered.
    """
    factors = adapter_parameters(lm)
    named = [(*item, bool(factors)) for item in checkpoint_parameters(lm, tied_twice=True)]
    named += [(*item, False) for item in factors.items()]
    return [_shard(lm, *item) for item in named]


def _shard(lm: nn.Module, name: str, param: nn.Parameter, frozen: bool) -> NamedShard:
    """Return a parameter's shard; of transformers' own fused experts as of `Experts`."""
    dim, local = param.placements[-1].dim, partial(local_tensor, param)
    is_fused = name.endswith(GATE_UP) and not isinstance(
        lm.get_submodule(name.rpartition(".")[0]), Experts
    )
    if not is_fused:
        return NamedShard(name, tuple(param.shape), local, dim, frozen)
    if dim:
        raise ValueError(f"{name} is sharded along dim {dim}: expected dim 0, its experts")
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


class Trace(NamedTuple):
    """All writes of the loader on one rank.

    Attributes:
        copies, fills: in the loader's order.
        parameters: shape of each parameter of the engine's model, and of each buffer that the
            loader writes.
    """

    copies: list[TracedCopy]
    fills: list[TracedFill]
    parameters: dict[str, tuple[int, ...]]
