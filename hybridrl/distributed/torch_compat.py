"""Private and version-dependent names of torch, all in one place.

NAMES lists those that are not imported here, which tests/unit/test_compat.py looks up.
"""

import inspect
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Backend, ProcessGroup, Store, distributed_c10d
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn import functional as F
from torch.nn.attention import activate_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

try:
    from torch.distributed import all_gather_single
except ImportError:  # the name before torch 2.13
    from torch.distributed import all_gather_into_tensor as all_gather_single

# varlen_attn supports fewer key heads than query heads; since torch 2.12 it needs a flag.
GROUPED_QUERY: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)

__all__ = [
    "CUSTOM_METADATA_KEY",
    "SAVED_OFFSETS_KEY",
    "TorchDispatchMode",
    "all_gather_single",
    "tree_leaves",
    "tree_map",
]

# (module, attribute); the dumps of flight recorders are not in every build and thus not listed.
NAMES: tuple[tuple[str, str], ...] = (
    ("torch", "UntypedStorage._cdata"),
    ("torch", "_C._accelerator_setAllocatorSettings"),
    ("torch", "ops.aten.fill_.Scalar._schema"),
    ("torch._dynamo", "maybe_mark_dynamic"),
    ("torch._dynamo.config", "disable"),
    ("torch.distributed.distributed_c10d", "_new_process_group_helper"),
    ("torch.distributed.distributed_c10d", "_pg_map"),
    ("torch.distributed.distributed_c10d", "_resolve_process_group"),
    ("torch.distributed.distributed_c10d", "_set_pg_timeout"),
    ("torch.distributed.distributed_c10d", "_world.pg_group_ranks"),
    ("torch.distributed.tensor", "DTensor._local_tensor"),
)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return a DTensor's local part, in a tenth of the time of to_local; others as they are."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def local_part(tensor: Tensor) -> tuple[Tensor, torch.Size]:
    """Return a DTensor's local part and its offsets in the whole; others are whole."""
    if not isinstance(tensor, DTensor):
        return tensor, torch.Size([0] * tensor.ndim)
    _, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tensor.to_local(), torch.Size(offsets)


def varlen_backward(
    grad: Tensor,
    qkv: Sequence[Tensor],
    output: Tensor,
    log_sum_exp: Tensor,
    bounds: tuple[Tensor, int, Tensor, int],
    scale: float,
    window: int | None = None,
) -> tuple[Tensor, ...]:
    """Compute gradients of causal attention as that of `varlen_attn`, from given results.

    Args:
        grad, output: [N, H, D]; of queries, keys and values [N, heads, D].
        log_sum_exp: of the scores, [H, N] float32.
        bounds: first token of each sequence [B + 1] int32, longest length; those of their keys.
        window: visible tokens, itself included; None: all.
    """
    starts, longest, key_starts, longest_keys = bounds
    grads = torch.ops.torch_attn._varlen_attn_backward(
        *(padded_heads(x).contiguous() for x in (grad, *qkv, output)),
        log_sum_exp,
        starts,
        key_starts,
        longest,
        longest_keys,
        window is None,
        torch.zeros(2, dtype=torch.uint64, device=grad.device),  # no dropout
        scale,
        [-1 if window is None else window - 1, 0],
    )
    return tuple(one[..., : grad.shape[-1]] for one in grads)


def padded_heads(x: Tensor) -> Tensor:
    """Return [..., D] with zeros behind, up to a size whose gradients FlashAttention 4 has right.

    4.0.0b36 adds up gradients in tiles of D rounded up to a multiple of 16 (flash_bwd_sm90.py).
    What reads them takes multiples of 32. So D = 8, 16, 40, 48, 72, 80, 104 and 112 have wrong
    ones, unless there is one short sequence.
    """
    missing = -x.shape[-1] % 32
    return F.pad(x, (0, missing)) if missing >= 16 else x


@contextmanager
def real_tensors() -> Iterator[None]:
    """Within this context new tensors are on the CPU and have data, whatever is set outside."""
    with _disable_current_modes(), torch.device("cpu"), torch.no_grad():
        yield


def storage_id(storage: torch.UntypedStorage) -> int:
    """Return the identity of a storage; storages of meta tensors have one, too."""
    return storage._cdata


def operator_schema(operator: Any) -> Any:
    """Return the schema of an ATen operator."""
    return operator._schema


def mark_dynamic(tensor: Tensor, dim: int) -> None:
    """Make torch.compile treat the size of a dim as a symbol, if nothing forces a constant."""
    torch._dynamo.maybe_mark_dynamic(tensor, dim)


def set_allocator(settings: str) -> None:
    """Change the settings of the GPU allocator, as PYTORCH_ALLOC_CONF, for later allocations."""
    torch._C._accelerator_setAllocatorSettings(settings)


def disable_dynamo() -> None:
    """Turn torch.compile off after torch._dynamo was imported."""
    torch._dynamo.config.disable = True


def set_timeouts(timeout: timedelta) -> None:
    """Set the timeout of collectives of all process groups of this process, vLLM's too."""
    for group in distributed_c10d._pg_map:
        distributed_c10d._set_pg_timeout(timeout, group)


def group_named(name: str) -> ProcessGroup:
    """Return the process group of a name, by which custom operators find it."""
    return distributed_c10d._resolve_process_group(name)


def activate_flash_attention_4() -> bool:
    """Replace torch's FlashAttention 2; return whether it was: not with torch before 2.14."""
    if TorchVersion(torch.__version__) < (2, 14):
        return False
    # Of its compiler, about an argument that is constant here.
    warnings.filterwarnings("ignore", "Argument aux_data", UserWarning)
    activate_flash_attention_impl("FA4")
    return True


def joined_group(
    name: str,
    store: Store,
    backend: str,
    rank: int,
    parts: Sequence[range],
    timeout: timedelta,
    device: torch.device | None,
) -> ProcessGroup:
    """Make a group over ranks that will have different default groups; call it before those exist.

    torch.distributed numbers the ranks of a group as in the default group. Here those of the own
    default group, one of `parts`, come first, as there, then all others. `rank` is that in the new
    group, `name` its name for `group_named`.
    """
    size = sum(map(len, parts))
    # No ranks, as for a default group: others would be looked up in one.
    group, _ = distributed_c10d._new_process_group_helper(
        size, rank, [], Backend(backend), store, name, timeout=timeout, device_id=device
    )
    own = next(part for part in parts if rank in part)
    order = [*own, *(other for other in range(size) if other not in own)]
    numbers = {other: number for number, other in enumerate(order)}
    ranks = {numbers[other]: other for other in range(size)}
    distributed_c10d._world.pg_group_ranks[group] = ranks
    return group


@contextmanager
def ranks_as_given() -> Iterator[None]:
    """Within this context, torch < 2.13 does not sort the ranks of a new group, nor anything."""
    distributed_c10d.sorted = list  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del distributed_c10d.sorted  # type: ignore[attr-defined]


def flight_records() -> list[bytes | None]:
    """Return pickled records of NCCL's and gloo's last collectives; None if a build has none."""
    from torch._C import _distributed_c10d as c10d

    dumps = "_dump_nccl_trace", "_dump_fr_trace"
    return [getattr(c10d, dump)() if hasattr(c10d, dump) else None for dump in dumps]
