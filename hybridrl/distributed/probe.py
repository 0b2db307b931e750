"""A forward without data: calls of attention, and what decoder layers keep for backward.

Stands in the place of packed attention, whose arguments it checks. Packed recurrences are run.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from hybridrl.config.planner.shape import AttentionShape
from hybridrl.distributed.forward.attention import BOUNDS, check_arguments, of_one_size
from hybridrl.distributed.forward.layers import ATTENTION
from hybridrl.distributed.forward.recurrent import pack_recurrences, recurrent_functions
from hybridrl.distributed.forward.vision import decoder
from hybridrl.distributed.torch_compat import real_tensors, storage_id, tree_leaves, tree_map

PROBE = "hybridrl_probe"
# Tokens of a forward; a prime that divides no size of a model, so that dims of tokens show.
TOKENS = 1021


class _Kept(torch.autograd.Function):
    """Keeps for backward what a kernel of attention keeps."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, output)
        return output

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[None, None, None]:
        raise AssertionError("only what is kept is asked")


class Probe:
    """Runs a model without data, and notes its calls of attention and what its layers keep.

    Attributes:
        attention: of the layers that have it, by their number.
        mixing: functions that read other tokens, of each layer.
        latent: elements of a token from which a layer makes all heads' keys and values, if so.
        linear: each layer's linear layers in the order of their calls.
        rotated: elements of a head that are rotated; 0 if no module of that name was called.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.attention: dict[int, AttentionShape] = {}
        self.mixing: list[set[str]] = [set() for _ in decoder(model).layers]
        self.latent: dict[int, int] = {}
        self.linear: list[dict[str, nn.Linear]] = [{} for _ in decoder(model).layers]
        self.rotated = 0
        self._layer = -1
        self._in_recurrence = False
        self._seen: set[int] = set()
        # Bytes of tensors in bfloat16, and of others, that each layer keeps.
        self._bytes = [[0, 0] for _ in self.linear]
        self._held: list[Tensor] = []
        self._base: Any = decoder(model)
        AttentionInterface.register(PROBE, self._attend)
        for name, module in self._base.named_modules():
            if name.endswith("rotary_emb"):
                module.forward = partial(self._rotate, module.forward)
        for module in self._base.layers.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    module._buffers[name] = buffer.to("meta")
        for index, layer in enumerate(self._base.layers):
            for name, module in layer.named_modules():
                if isinstance(module, nn.Linear):
                    module.register_forward_hook(partial(self._note_linear, name))
            layer.register_forward_pre_hook(partial(self._enter, index), with_kwargs=True)
            layer.register_forward_hook(self._leave)

    def kept(self) -> list[tuple[int, int]]:
        """Return elements of float32, and of param_dtype, that each layer keeps of a token.

        Numbers of which a row has one, such as its variance, are left out.
        """
        self._seen = {storage_id(p.untyped_storage()) for p in self._base.parameters()}
        ids = torch.zeros(1, TOKENS, dtype=torch.int64, device="meta")
        bounds = torch.zeros(2, dtype=torch.int32, device="meta")
        named = dict.fromkeys(BOUNDS[:4], TOKENS) | {BOUNDS[0]: bounds, BOUNDS[2]: bounds}
        positions = torch.arange(TOKENS, device="meta")[None]
        own = [(names, key, names[key]) for names, key in recurrent_functions(self._base)]
        if pack_recurrences(self._base):
            named["seq_idx"] = torch.zeros(1, TOKENS, dtype=torch.int32, device="meta")
        for names, key, _ in own:
            names[key] = partial(self._recur, key, names[key])
        with torch.autograd.graph.saved_tensors_hooks(self._note, lambda tensor: tensor):
            try:
                self._base(input_ids=ids, position_ids=positions, use_cache=False, **named)
            finally:
                for names, key, function in own:
                    names[key] = function
        return [(other // 4 // TOKENS, low // 2 // TOKENS) for low, other in self._bytes]

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        kwargs.pop("scaling", None)
        check_arguments(mask, kwargs)
        if BOUNDS[0] not in kwargs | (vars(module).get("packed_bounds") or {}):
            raise ValueError("its attention gets no bounds of sequences")
        if query.shape[-1] < value.shape[-1]:
            raise ValueError(f"its heads have {query.shape[-1]} keys and {value.shape[-1]} values")
        window = kwargs.get("sliding_window")
        if window is not None and window < 1:
            raise ValueError(f"its attention has a window of {window} tokens")
        sizes = query.shape[1], key.shape[1], query.shape[3]
        self.attention[self._layer] = AttentionShape(*sizes, window)
        self.mixing[self._layer].add(ATTENTION)
        if "kv_lora_rank" in (parts := vars(module)):
            self.latent[self._layer] = parts["kv_lora_rank"] + parts["qk_rope_head_dim"]
        qkv = query, key, of_one_size(query, value)
        tokens = (x[0].transpose(0, 1).contiguous() for x in qkv)
        return _Kept.apply(*tokens)[None, ..., : value.shape[-1]], None

    def _recur(self, name: str, function: Any, *args: Any, **kwargs: Any) -> Any:
        self.mixing[self._layer].add(name)
        self._in_recurrence = True
        output = function(*args, **kwargs)
        self._in_recurrence = False
        return output

    def _enter(self, index: int, layer: object, args: object, kwargs: object) -> None:
        self._layer = index
        given = [x for x in tree_leaves(kwargs) if isinstance(x, Tensor)]  # to all layers
        self._held += given
        self._seen |= {storage_id(x.untyped_storage()) for x in given}

    def _leave(self, layer: object, args: object, output: object) -> None:
        self._layer = -1

    def _note_linear(self, name: str, module: nn.Linear, args: object, output: object) -> None:
        self.linear[self._layer][name] = module

    def _rotate(self, forward: Any, states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Compute rotations of real positions: some depend on the largest."""
        with real_tensors():
            tokens = states.shape[1]
            real = torch.zeros(1, tokens, 1, dtype=states.dtype)
            given = kwargs.pop("position_ids") if "position_ids" in kwargs else args[0]
            # [1, N], or with a dim of kinds of positions before.
            positions = torch.arange(tokens).expand(given.shape)
            output = forward(real, positions, *args[1:], **kwargs)
        self.rotated = max(self.rotated, tree_leaves(output)[0].shape[-1])
        return tree_map(lambda tensor: tensor.to("meta"), output)

    def _note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if self._layer < 0 or storage_id(storage) in self._seen:
            return tensor
        self._seen.add(storage_id(storage))
        self._held.append(tensor)  # its storage is no other's
        # Recurrences pad tokens to whole chunks.
        of_tokens = any(size % TOKENS == 0 for size in tensor.shape) or (
            self._in_recurrence and tensor.numel() >= TOKENS
        )
        if of_tokens and tensor.dim() > 1 and tensor.shape[-1] > 1:
            self._bytes[self._layer][tensor.dtype is not torch.bfloat16] += storage.nbytes()
        return tensor
