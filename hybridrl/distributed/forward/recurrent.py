"""Recurrent layers over packed sequences: convolutions and states start anew at each bound.

transformers computes gated delta rules (Qwen3.5, Qwen3-Next), Mamba-2 (Nemotron-H) and short
convolutions (LFM2) by three functions of each modelling file. Without extra kernels they ignore the
bounds that packing passes, in silence. Here they are replaced by functions that require them. On a
GPU with flash-linear-attention the gated delta rule is its kernels'.

Shapes:  N = packed tokens   C = channels   K = taps of a convolution
"""

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import distributions, version
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from hybridrl.config.errors import ConfigError
from hybridrl.distributed.forward.packing import Padding

DELTA_RULE = "torch_chunk_gated_delta_rule"
RECURRENCES = (DELTA_RULE, "mamba2_chunk_scan")
# Package with kernels of the gated delta rule, and the first Triton that compiles them right.
KERNELS, OLDEST_TRITON = "fla-core", (3, 7, 1)
KERNEL_ARGUMENTS = ("g", "beta", "use_qk_l2norm_in_kernel")
CONVOLUTION = "causal_conv1d_fn"
# Arguments of other kernels. Of Nemotron-H transformers alone limits steps (dt_limit) from below by
# config.json's time_step_min; vLLM's model and NVIDIA's own do not.
IGNORED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_k", "seq_idx", "dt_limit")


def pack_recurrences(lm: nn.Module) -> set[str]:
    """Make the recurrent layers of a transformers model respect bounds; return what was replaced.

    The functions are replaced in transformers' modules, for all models of the process.
    """
    places = recurrent_functions(lm)
    for functions, name in places:
        if name == CONVOLUTION:
            functions[name] = packed_convolution
        elif not isinstance(functions[name], Recurrence):
            # transformers hides its function behind one of a package that is installed.
            function = inspect.unwrap(functions[name])
            functions[name] = Recurrence(function, has_kernel=name == DELTA_RULE)
    return {name for _, name in places}


def recurrent_functions(lm: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Return where each function that is replaced lies: the names of a file, and its own."""
    files = [
        vars(sys.modules[file]) for file in {type(module).__module__ for module in lm.modules()}
    ]
    return [(names, key) for names in files for key in names.keys() & {CONVOLUTION, *RECURRENCES}]


def packed_convolution(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    seq_idx: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Convolve each channel of states [1, C, N] with weights [C, K], causally in a sequence.

    `seq_idx`: sequence of each token, [1, N].
    """
    if seq_idx is None:
        raise ValueError("a convolution of packed sequences needs seq_idx")
    states = states.contiguous()  # from channels last, which strides through memory
    total = states * weight[:, -1, None]
    taps = weight.shape[-1]
    before, sequences = F.pad(states, (taps, 0)), F.pad(seq_idx, (taps, 0), value=-1)
    for shift in range(1, taps):
        place = slice(taps - shift, -shift)
        earlier = before[..., place] * (sequences[:, place] == seq_idx)[:, None]
        total = total + earlier * weight[:, -1 - shift, None]
    if bias is not None:
        total = total + bias[:, None]
    return total if activation is None else ACT2FN[activation](total)


@dataclass(frozen=True)
class Recurrence:
    """Recurrence over tokens, by a kernel or of sequences that are padded on the right."""

    function: Callable[..., Any]
    has_kernel: bool = False

    def __call__(self, *tensors: Any, **others: Any) -> Any:
        """Compute the recurrence of tensors [1, N, ...], given cu_seqlens or cu_seq_lens_q."""
        bounds = others.pop("cu_seqlens", None)
        if bounds is None:
            bounds = others.pop("cu_seq_lens_q", None)
        if bounds is None:
            raise ValueError("a recurrence over packed sequences needs cu_seq_lens_q")
        num_tokens, longest = tensors[0].shape[1], int(others.pop("max_length_q"))
        for name in IGNORED:
            others.pop(name, None)
        kernel = delta_rule_kernel() if self.has_kernel and is_half_on_gpu(tensors[0]) else None
        if kernel is not None:
            known = {name: others[name] for name in KERNEL_ARGUMENTS if name in others}
            return kernel(*tensors, cu_seqlens=bounds.long(), **known)[0], None
        padding = Padding.of(bounds, longest, num_tokens)

        def pad(x: Any) -> Any:
            of_tokens = isinstance(x, Tensor) and x.shape[:2] == (1, num_tokens)
            return padding.pad(x[0]) if of_tokens else x

        output = self.function(*map(pad, tensors), **{name: pad(x) for name, x in others.items()})
        if isinstance(output, tuple):
            return padding.unpad(output[0])[None], None
        return padding.unpad(output)[None]


def is_half_on_gpu(x: Tensor) -> bool:
    """Return whether the kernel supports such tensors."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


@functools.cache
def delta_rule_kernel() -> Callable[..., Any] | None:
    """Return the gated delta rule of flash-linear-attention; None if it is not installed.

    Raises:
        ConfigError: the installed Triton is too old for it.
    """
    if not any(distributions(name=KERNELS)):
        return None
    triton = version("triton")
    if tuple(map(int, triton.partition("+")[0].split(".")[:3])) < OLDEST_TRITON:
        oldest = ".".join(map(str, OLDEST_TRITON))
        raise ConfigError(
            f"{KERNELS} is installed, with triton {triton}: expected {oldest} or later. With "
            f"earlier ones gradients of its gated delta rule are wrong on Hopper GPUs.\n"
            f"Install a later triton, with a later torch, or remove {KERNELS}."
        )
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule
