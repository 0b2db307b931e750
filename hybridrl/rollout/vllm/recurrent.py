"""vLLM's gated delta rule on CPUs in plain torch: its kernels there have bfloat16 only.

They also want the weights of convolutions packed, so that none could be written by a sync.

Shapes:  B = sequences   T = longest   N = tokens   C = channels   K = taps of the convolution
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hybridrl.distributed.forward.packing import Padding
from hybridrl.distributed.forward.recurrent import Recurrence


def delta_rule() -> Callable[..., None]:
    """Return what takes the place of vLLM's `cpu_gdn_attention_core`."""
    from vllm.forward_context import get_forward_context
    from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name

    def core(
        mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, layer_name: LayerNameType
    ) -> None:
        context = get_forward_context()
        if context.attn_metadata is None:  # vLLM measures memory
            return
        layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
        batch = context.attn_metadata[layer.prefix]
        slots = batch.non_spec_state_indices_tensor
        if batch.num_prefills:
            for state in layer.kv_cache:
                state[slots[: len(batch.has_initial_state)][~batch.has_initial_state]] = 0
        decodes, last = batch.num_decodes, batch.num_decodes + batch.num_prefills
        for first, end in ((0, decodes), (decodes, last)):
            bounds = batch.non_spec_query_start_loc[first : end + 1]
            tokens = slice(int(bounds[0]), int(bounds[-1]))
            if first < end:
                inputs = mixed_qkv[tokens], b[tokens], a[tokens]
                core_attn_out[tokens] = _advance(
                    layer, *inputs, bounds - bounds[0], slots[first:end]
                )

    return core


def _advance(
    layer: Any, mixed: Tensor, b: Tensor, a: Tensor, bounds: Tensor, slots: Tensor
) -> Tensor:
    """Return the rule's output of [N, C], and advance the states of B sequences."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as rules
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    longest, weight = int(bounds.diff().max()), layer.conv1d.weight
    padding = Padding.of(bounds, longest, len(mixed))
    kept = layer.kv_cache[0] if is_conv_state_dim_first() else layer.kv_cache[0].transpose(1, 2)
    inputs = torch.cat([kept[slots], padding.pad(mixed).transpose(1, 2)], -1)
    ends = bounds.diff()[:, None] + torch.arange(weight.shape[-1] - 1)
    kept[slots] = inputs.gather(2, ends[:, None].expand(-1, len(weight), -1))
    mixed = F.silu(F.conv1d(inputs, weight, layer.conv1d.bias, groups=len(weight))).transpose(1, 2)

    q, k, v = (x.view(*mixed.shape[:2], *x.shape[2:]) for x in _split(layer, mixed))
    decay = -layer.A_log.float().exp() * F.softplus(a.float() + layer.dt_bias)
    states = layer.kv_cache[1]
    states = states.view(*states.shape[:2], q.shape[-1], v.shape[-1])
    rule = rules.torch_chunk_gated_delta_rule
    rule = rule.function if isinstance(rule, Recurrence) else rule
    # transformers hides its functions behind those of a package for GPUs.
    rule = inspect.unwrap(rules.torch_recurrent_gated_delta_rule if longest == 1 else rule)
    output, states[slots] = rule(
        *(q, k, v),
        g=padding.pad(decay),  # zeros of padding leave the states as they are
        beta=padding.pad(b.sigmoid()),
        initial_state=states[slots],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return padding.unpad(output)


def _split(layer: Any, mixed: Tensor) -> tuple[Tensor, ...]:
    """Return queries, keys and values of all heads of values, [1, B T, heads, size]."""
    q, k, v = layer.rearrange_mixed_qkv(mixed.flatten(0, 1))
    return (*(x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k)), v)
