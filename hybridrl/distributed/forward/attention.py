"""Attention over packed sequences, without padding or masks.

Shapes:  N = packed tokens   B = sequences   T = longest   H, K = query, key heads   D = head size

The model runs on [1, N] tokens. transformers passes `cu_seq_lens_q`, `max_length_q` and their `_k`
twins from the model's arguments to the attention function, the only one that needs the bounds of
sequences.
"""

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from importlib.metadata import distributions
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from hybridrl.config.planner.shape import has_flash_kernel
from hybridrl.distributed.forward.exact import EXACT_ATTENTION
from hybridrl.distributed.forward.exact_ops import attention
from hybridrl.distributed.forward.packing import Padding
from hybridrl.distributed.forward.sequence_parallel import heads_of_all_tokens, tokens_of_all_heads
from hybridrl.distributed.forward.sinks import with_sinks
from hybridrl.distributed.torch_compat import (
    GROUPED_QUERY,
    activate_flash_attention_4,
    padded_heads,
)

# Of queries, keys and values; bounds and longest length of sequences, those of their keys; scaling;
# window. Where a sequence has more keys than queries, the last of both are of the same token.
Bounds = tuple[Tensor, int, Tensor, int]
Attend = Callable[[Sequence[Tensor], Bounds, float | None, int | None], Tensor]

logger = logging.getLogger(__name__)

PACKED_ATTENTION = "hybridrl_packed"
# Of towers, to which transformers passes bounds of images, no masks, for the word "flash".
TOWER_ATTENTION = "hybridrl_as_flash"

# Arguments that say which tokens are a sequence, and of which rank.
BOUNDS = (
    *("cu_seq_lens_q", "max_length_q", "cu_seq_lens_k", "max_length_k"),
    *("sequence_group", "num_shared_tokens", "key_index"),
)
# Arguments that are read, or whose effect is in queries and keys already; and those with values
# that change nothing. Any other may change the scores: ignoring it would be silently wrong.
KNOWN = {*BOUNDS, "sliding_window", "s_aux", "seq_idx", "position_ids"}
NEUTRAL = {"dropout": 0.0, "is_causal": True, "use_cache": False, "output_attentions": False}
NEUTRAL |= {"output_router_logits": False}


def register_packed_attention() -> None:
    """Register the implementations of attention here; transformers then builds no mask."""
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    AttentionInterface.register(EXACT_ATTENTION, partial(packed_attention, attend=_exact))
    AttentionInterface.register(TOWER_ATTENTION, tower_attention)
    choose_kernel()


@functools.cache
def choose_kernel() -> None:
    """Make `varlen_attn` run FlashAttention 4 on Hopper GPUs if flash-attn-4 is installed.

    It is faster there than FlashAttention 2 with 512 and 4,096 tokens (benchmarks/RESULTS.md).
    """
    installed = any(distributions(name="flash-attn-4"))
    is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    if installed and is_hopper and activate_flash_attention_4():
        logger.info("attention runs FlashAttention 4")


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    attend: Attend | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each packed sequence, with transformers' signature.

    Args:
        module: holds the bounds if its layer did not pass them on (layers.py).
        attention_mask: None; a mask is a ValueError, as arguments that are not known.
        query: [1, H, N, D].
        key, value: [1, K, N, D]; H is a multiple of K. Values may be smaller.
        scaling: factor on the scores; None: D ** -0.5.
        attend: the kernel; None: FlashAttention where it supports such tensors, else padded.
        kwargs: cu_seq_lens_q [B + 1] int32 and max_length_q are required; sliding_window is the
            number of visible tokens, itself included; s_aux [H] are sinks. With sequence_group the
            tokens are this rank's shard of num_shared_tokens; cu_seq_lens_q covers all of them.
            With key_index [K], the tokens of sequences' keys, cu_seq_lens_k and max_length_k are
            their bounds.

    Returns:
        [1, N, H, size of values], and None in place of the attention weights.
    """
    check_arguments(attention_mask, kwargs)
    kwargs = _with_bounds(module, kwargs)
    if attend is None:
        attend = _varlen if has_kernel(query.device, query.dtype, query.shape[-1]) else _padded
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    group = kwargs.get("sequence_group")
    sinks = kwargs.get("s_aux")
    if group is not None:
        v = of_one_size(q, v)
        q, k, v = heads_of_all_tokens(q, k, v, kwargs["num_shared_tokens"], group)
        sinks = None if sinks is None else sinks.chunk(group.size)[group.rank]
    if sinks is not None:
        attend = partial(with_sinks if attend is _varlen else _padded, sinks=sinks)
    own = kwargs["cu_seq_lens_q"], kwargs["max_length_q"]
    bounds = *own, *own
    if (index := kwargs.get("key_index")) is not None:
        k, v = (_Repeated.apply(x, index) for x in (k, v))
        bounds = *own, kwargs["cu_seq_lens_k"], kwargs["max_length_k"]
    window = kwargs.get("sliding_window")
    output = attend((q, k, v), bounds, scaling, window)[..., : v.shape[-1]]
    if group is not None:
        output = tokens_of_all_heads(output, query.shape[2], group)
    return output[None, ..., : value.shape[-1]], None


class _Repeated(torch.autograd.Function):
    """x[index] of [N, heads, D]; gradients of repeated tokens add up in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.count = len(x)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        total = grads[0].new_zeros(ctx.count, *grads[0].shape[1:], dtype=torch.float32)
        return total.index_add_(0, index, grads[0].float()).to(grads[0].dtype), None


def tower_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention of each patch to all of its image or window, as `packed_attention`."""
    qkv = [x[0].transpose(0, 1) for x in (query, key, value)]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    sizes, mask = (len(cu_seq_lens_q) - 1, int(max_length_q)), None
    if math.prod(sizes) == query.shape[2]:  # all have equally many: FlashAttention, without a mask
        q, k, v = (padded_heads(x.unflatten(0, sizes).transpose(1, 2)) for x in qkv)
    else:
        padding = Padding.of(cu_seq_lens_q, sizes[1], query.shape[2])
        q, k, v = (padding.pad(x).transpose(1, 2) for x in qkv)
        places = torch.arange(sizes[1], device=query.device)
        mask = (places < cu_seq_lens_q.diff()[:, None])[:, None, None]
    output = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling).transpose(1, 2)
    output = output.flatten(0, 1) if mask is None else padding.unpad(output)
    return output[None, ..., : value.shape[-1]], None


def check_arguments(attention_mask: Tensor | None, kwargs: Mapping[str, Any]) -> None:
    """Raise a ValueError that names arguments of attention that packed attention ignores."""
    unknown = [
        f"{name} = {value}" if isinstance(value, bool | float | int | str) else name
        for name, value in kwargs.items()
        if value is not None
        and name not in KNOWN
        and (name not in NEUTRAL or NEUTRAL[name] != value)
    ]
    if attention_mask is not None:
        unknown.append("a mask")
    if unknown:
        raise ValueError(f"packed attention does not compute {', '.join(unknown)}")


def _with_bounds(module: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with bounds of sequences; those of the module if they have none."""
    if BOUNDS[0] in kwargs:
        return kwargs
    bounds = module.packed_bounds
    if bounds is None:
        raise ValueError("packed attention got no bounds of sequences (cu_seq_lens_q)")
    return kwargs | bounds


@functools.cache
def warn_of_padding(device: torch.device, dtype: torch.dtype, head_size: int) -> None:
    """Warn once if FlashAttention does not support such tensors on this GPU."""
    if device.type == "cuda" and not has_kernel(device, dtype, head_size):
        logger.warning(
            "attention pads: FlashAttention supports bfloat16 and head sizes that are multiples of "
            "8 up to 256, not %s with head size %d. Every layer computes pad tokens; set "
            "fsdp.param_dtype=bfloat16 if the model allows",
            dtype,
            head_size,
        )


def has_kernel(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Return whether FlashAttention (varlen_attn) supports such tensors."""
    half = dtype in (torch.bfloat16, torch.float16)
    return device.type == "cuda" and half and has_flash_kernel(head_size)


def _varlen(
    qkv: Sequence[Tensor], bounds: Bounds, scaling: float | None, window: int | None
) -> Tensor:
    """Compute attention of [N, heads, D] by the kernel, maybe with zeros behind the output."""
    starts, longest, key_starts, longest_keys = bounds
    query, key, value = qkv
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return varlen_attn(
        *(padded_heads(x).contiguous() for x in (query, key, of_one_size(query, value))),
        starts,
        key_starts,
        longest,
        longest_keys,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        **GROUPED_QUERY,
    )


def of_one_size(query: Tensor, value: Tensor) -> Tensor:
    """Return smaller values with zeros behind them: the kernel has one size of heads."""
    missing = query.shape[-1] - value.shape[-1]
    return F.pad(value, (0, missing)) if missing else value


def _exact(
    qkv: Sequence[Tensor], bounds: Bounds, scaling: float | None, window: int | None
) -> Tensor:
    """Compute the same by vLLM's kernel; no window cuts (config/checks/exact.py)."""
    scaling = qkv[0].shape[-1] ** -0.5 if scaling is None else scaling
    return attention(*(x.contiguous() for x in qkv), *bounds[:2], scaling)[0]


def _padded(
    qkv: Sequence[Tensor],
    bounds: Bounds,
    scaling: float | None,
    window: int | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute the same, right-padded to [B, heads, T, D], where causal attention never reads.

    FlashAttention computes it in 16-bit dtypes without a mask, whatever `has_kernel` says.

    With sinks there is a last key without value, whose score is the head's sink.
    """
    starts, longest, key_starts, max_length = bounds
    queries, keys = qkv[0].shape[0], qkv[1].shape[0]
    padding = of_keys = Padding.of(starts, longest, queries)
    mask = None
    if keys != queries:  # each sequence has queries for its last keys
        of_keys = Padding.of(key_starts, max_length, keys)
        place = torch.arange(max_length, device=starts.device)
        before = key_starts.diff() - starts.diff()
        behind = before[:, None, None] + place[:longest, None] - place  # of a key, [B, T, K]
        mask = (behind >= 0) if window is None else (behind >= 0) & (behind < window)
        mask = mask[:, None]
    elif sinks is not None or (window is not None and window < max_length):
        ones = torch.ones(max_length, max_length, dtype=torch.bool, device=qkv[0].device)
        mask = ones.tril() if window is None else ones.tril() & ones.triu(1 - window)
    q = padding.pad(qkv[0]).transpose(1, 2)
    k, v = (of_keys.pad(x).transpose(1, 2) for x in qkv[1:])
    if sinks is not None:
        assert mask is not None
        mask = mask.expand(len(mask) if mask.dim() > 2 else 1, len(sinks), *mask.shape[-2:])
        scores = q.new_zeros(mask.shape).masked_fill(~mask, -torch.inf)
        last = sinks.to(q.dtype)[None, :, None, None].expand(len(mask), -1, longest, 1)
        mask = torch.cat([scores, last], -1)
        k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
    scaling = q.shape[-1] ** -0.5 if scaling is None else scaling
    if mask is None and q.element_size() == 2:
        q, k, v = map(padded_heads, (q, k, v))
    # Of scores with a gradient, others compute something else: ratios would not be exactly 1.
    with nullcontext() if sinks is None else sdpa_kernel(SDPBackend.MATH):
        output = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
        )
    return padding.unpad(output.transpose(1, 2))
