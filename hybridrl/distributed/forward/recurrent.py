"""Recurrent layers over packed sequences: convolutions and states start anew at each bound.

transformers computes gated delta rules (Qwen3.5, Qwen3-Next), Mamba-2 (Nemotron-H) and short
convolutions (LFM2) by three functions of each modelling file. Without extra kernels they ignore the
bounds that packing passes, in silence. Here they are replaced by functions that require them.

Shapes:  N = packed tokens   B = sequences   T = longest   C = channels   K = taps of a convolution
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN


def sequence_index(bounds: Tensor) -> Tensor:
    """Return the sequence of each packed token, [1, N] int32, from bounds [B + 1]."""
    index = torch.arange(len(bounds) - 1, dtype=torch.int32, device=bounds.device)
    return index.repeat_interleave(bounds.diff())[None]


def pack_recurrences(lm: nn.Module) -> set[str]:
    """Make the recurrent layers of a transformers model respect bounds; return what was replaced.

    The functions are replaced in transformers' modules, for all models of the process.
    """
    replaced = set()
    for file in {type(module).__module__ for module in lm.modules()}:
        functions = vars(sys.modules[file])
        for name, pack in PACKED.items():
            if name in functions:
                replaced.add(name)
                if not isinstance(functions[name], Recurrence | Convolution):
                    functions[name] = pack(functions[name])
    return replaced


@dataclass(frozen=True)
class Convolution:
    """Causal convolution of each channel that never reads across a bound."""

    function: Callable[..., Tensor]

    def __call__(
        self,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        *,
        seq_idx: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Convolve states [1, C, N] with weights [C, K]; `seq_idx` is of `sequence_index`."""
        if seq_idx is None:
            raise ValueError("a convolution of packed sequences needs seq_idx")
        total = states * weight[:, -1, None]
        for shift in range(1, weight.shape[-1]):
            same = F.pad(seq_idx[:, shift:] == seq_idx[:, :-shift], (shift, 0))
            earlier = F.pad(states[..., :-shift], (shift, 0)) * same[:, None]
            total = total + earlier * weight[:, -1 - shift, None]
        if bias is not None:
            total = total + bias[:, None]
        return total if activation is None else ACT2FN[activation](total)


@dataclass(frozen=True)
class Recurrence:
    """Recurrence over tokens, computed of sequences that are padded on the right."""

    function: Callable[..., Any]

    def __call__(self, *tensors: Any, **others: Any) -> Any:
        """Compute the recurrence of tensors [1, N, ...], given cu_seqlens or cu_seq_lens_q."""
        bounds = others.pop("cu_seqlens", None)
        if bounds is None:
            bounds = others.pop("cu_seq_lens_q", None)
        if bounds is None:
            raise ValueError("a recurrence over packed sequences needs cu_seq_lens_q")
        padding = Padding.of(bounds, int(others.pop("max_length_q")))
        for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_k", "seq_idx"):
            others.pop(name, None)
        output = self.function(
            *map(padding.pad, tensors), **{name: padding.pad(x) for name, x in others.items()}
        )
        if isinstance(output, tuple):
            return padding.unpad(output[0]), None
        return padding.unpad(output)


@dataclass(frozen=True)
class Padding:
    """Places of N packed tokens in B rows of T.

    Attributes:
        slot: [N] int64.
        sizes: B, T.
    """

    slot: Tensor
    sizes: tuple[int, int]

    @classmethod
    def of(cls, bounds: Tensor, longest: int) -> "Padding":
        """Compute the places from bounds [B + 1], int32."""
        sequence = sequence_index(bounds)[0].long()
        position = torch.arange(len(sequence), device=bounds.device) - bounds[sequence]
        return cls(sequence * longest + position, (len(bounds) - 1, longest))

    def pad(self, x: Any) -> Any:
        """Return [B, T, ...] of a tensor [1, N, ...], zero in the padding; others as they are."""
        if not isinstance(x, Tensor) or x.shape[:2] != (1, len(self.slot)):
            return x
        rows = x.new_zeros(self.sizes[0] * self.sizes[1], *x.shape[2:])
        return rows.index_copy(0, self.slot, x[0]).unflatten(0, self.sizes)

    def unpad(self, x: Tensor) -> Tensor:
        """Return [1, N, ...] of [B, T, ...]."""
        return x.flatten(0, 1).index_select(0, self.slot)[None]


PACKED: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": Convolution,
    "torch_chunk_gated_delta_rule": Recurrence,
    "mamba2_chunk_scan": Recurrence,
}
