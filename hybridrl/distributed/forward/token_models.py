"""Root modules of FSDP2: a transformers model with a head for log-probs, values or scores.

FSDP2 gathers a root's own weights (embedding, final norm, head) in hooks around the root's
forward. A direct call of the inner model would bypass them, so all computation with weights is in
the forwards here.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from hybridrl.config.errors import ConfigError
from hybridrl.config.planner.families import placeholder_ids
from hybridrl.distributed.forward.layers import layer_function
from hybridrl.distributed.forward.log_probs import Entropy, ResponseLogProbs, token_log_probs
from hybridrl.distributed.forward.packing import Packed, sequence_index
from hybridrl.distributed.forward.recurrent import pack_recurrences
from hybridrl.distributed.forward.routing import has_experts, take_routing
from hybridrl.distributed.forward.sequence_parallel import GatherSequence
from hybridrl.distributed.forward.vision import (
    decoder,
    image_packer,
    inputs_with_images,
    text_config,
)
from hybridrl.distributed.torch_compat import mark_dynamic, real_tensors, tree_leaves, tree_map


class Head(NamedTuple):
    """Language-modelling head: logits are cap_(states @ weight.T / divisor).

    Attributes:
        weight: [V, H].
        divisor: of the products.
        cap: see `divisor_and_cap`.
        banned: [K] int64, tokens that are never sampled.
    """

    weight: Tensor
    divisor: float
    cap: float | None
    banned: Tensor | None = None


# A function of the states that predict response tokens, [R, H], and the head: [R] float32.
Target = Callable[[Tensor, Head], Tensor]


class TokenLogProbs(nn.Module):
    """Causal language model that returns log-probs of response tokens.

    Its attention is "hybridrl_packed"; for `chunk_tokens`, `keep_logits` and `exact` see
    log_probs.py.
    """

    banned: Tensor | None

    def __init__(
        self, lm: PreTrainedModel, chunk_tokens: int, *, keep_logits: bool, exact: bool = False
    ) -> None:
        super().__init__()
        self.lm = lm
        self.logits_divisor, self.cap = divisor_and_cap(lm)
        self.chunk_tokens = chunk_tokens
        self.keep_logits = keep_logits
        self.exact = exact
        self.recurrent = bool(pack_recurrences(lm))
        self.images = image_packer(lm)
        banned = placeholder_ids(lm.config.to_dict())
        self.register_buffer("banned", torch.tensor(banned) if banned else None, persistent=False)

    @torch.no_grad()
    def gathered_head(self, dtype: torch.dtype) -> "Head":
        """Return a copy of the head in a dtype, gathered from all ranks; a collective."""
        weight = self.lm.get_output_embeddings().weight.to(dtype, copy=True)
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        return self._head(whole)

    def _head(self, weight: Tensor) -> "Head":
        return Head(weight, self.logits_divisor, self.cap, self.banned)

    def forward(
        self,
        packed: Packed,
        temperature: float,
        entropy: Entropy,
        target: "Target | None" = None,
    ) -> ResponseLogProbs:
        """Compute log-probs (and entropies) of response tokens, [R] float32, nats.

        If ranks share the input, R counts the response tokens of all of them. With a target also
        its number of each token.
        """
        hidden = response_states(self.lm.base_model, packed, recurrent=self.recurrent)
        routing = take_routing(decoder(self.lm).layers, packed)
        weight = self.lm.get_output_embeddings().weight
        own = token_log_probs(
            hidden,
            packed.response_ids,
            weight,
            temperature=temperature * self.logits_divisor,
            cap=self.cap,
            chunk_tokens=self.chunk_tokens,
            entropy=entropy,
            keep_logits=self.keep_logits,
            exact=self.exact,
            kept=packed.kept,
            banned=self.banned,
        )
        entropies = None if own.entropy is None else gather_sequence(own.entropy, packed)
        further = None
        if target is not None:
            further = target(hidden, self._head(weight))
        log_probs = gather_sequence(own.log_probs, packed)
        return ResponseLogProbs(log_probs, entropies, routing, hidden.detach(), further)


class _Fixed(nn.Module):
    """Stands for a model below its head: returns the same states for all tokens."""

    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self.states = states

    def forward(self, **kwargs: Any) -> "_States":
        return _States(last_hidden_state=self.states)  # type: ignore[arg-type]


@dataclass
class _States(BaseModelOutput):
    """States of all tokens; families name other outputs, which there are not."""

    def __getattr__(self, name: str) -> None:
        return None


def divisor_and_cap(lm: PreTrainedModel) -> tuple[float, float | None]:
    """Return what a causal language model makes of the products x of its head.

    Its logits are x / divisor, or cap tanh(x / cap) if config.json names a cap. Its own forward is
    run above states of 1 and 30, with a head of ones.

    Raises:
        ConfigError: logits are something else.
    """
    cap: float | None = text_config(lm).to_dict().get("final_logit_softcapping")
    head, sizes = lm.get_output_embeddings(), (1.0, 30.0)
    other, logits = copy.copy(lm), []
    with real_tensors():
        ones = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.ones_(ones.weight)
        own = {name: ones if module is head else module for name, module in lm._modules.items()}
        for size in sizes:
            states = torch.full((1, 1, 1), size, dtype=torch.float64)
            other._modules = own | {lm.base_model_prefix: _Fixed(states)}
            logits.append(float(other(input_ids=torch.zeros(1, 1, dtype=torch.int64)).logits))
    divisor = 1.0 if cap else float(f"{1 / logits[0]:.12g}")
    expected = [cap * math.tanh(x / cap) if cap else x / divisor for x in sizes]
    if head.bias is not None or not np.allclose(logits, expected, rtol=1e-6):
        raise ConfigError("its logits are biased, or no multiple of the head's products")
    return divisor, cap


class ScalarModel(nn.Module):
    """Backbone of a language model with a scalar float32 head: of a critic or a reward model.

    Args:
        backbone: the model below its language-modelling head; attention "hybridrl_packed".
        bias: true for a critic; score heads of transformers' sequence classifiers have none.
    """

    def __init__(self, backbone: PreTrainedModel, *, bias: bool) -> None:
        super().__init__()
        self.backbone = backbone
        self.recurrent = bool(pack_recurrences(backbone))
        self.images = image_packer(backbone)
        self.head = nn.Linear(
            text_config(backbone).hidden_size,
            1,
            bias=bias,
            device=backbone.device,
            dtype=torch.float32,
        )

    def forward(self, packed: Packed) -> Tensor:
        """Compute the head's number for each requested state, [R] float32.

        It is V(s_t) of the state that predicts each response token; with States.last the score of
        each response. If ranks share the input, R counts the states of all of them.
        """
        states = response_states(self.backbone, packed, recurrent=self.recurrent)
        numbers = self.head(states.float())
        take_routing(decoder(self.backbone).layers, packed)  # which holds the graph
        # A copy: FSDP2 hooks backward to this output, which must not be a view.
        return gather_sequence(numbers.squeeze(-1).clone(), packed)


def response_states(backbone: PreTrainedModel, packed: Packed, *, recurrent: bool) -> Tensor:
    """Compute the final hidden states of positions packed.state_index, [R, H]."""
    shard = packed.shard
    sharing: dict[str, Any] = {}
    if recurrent:
        index = sequence_index(packed.cu_seq_lens, packed.input_ids.shape[1])
        sharing = {"seq_idx": index.to(torch.int32)[None]}
    if shard is not None:
        if recurrent:
            raise ValueError("recurrent layers are not shared between ranks (fsdp.ulysses_size)")
        sharing = {"sequence_group": shard.group, "num_shared_tokens": shard.num_tokens}
    if packed.routed_experts is not None:
        layers = sum(map(has_experts, decoder(backbone).layers))
        sharing["routed_experts"] = packed.routed_experts.unflatten(2, (layers, -1))
    inputs: dict[str, Any] = {"input_ids": packed.input_ids}
    if packed.images is not None:
        inputs = inputs_with_images(backbone, packed.input_ids, packed.images)
    keys = packed.keys
    if keys is not None:
        sharing = {"key_index": keys.index}
    output = decoder(backbone)(
        **inputs,
        position_ids=packed.position_ids,
        use_cache=False,
        cu_seq_lens_q=packed.cu_seq_lens,
        cu_seq_lens_k=packed.cu_seq_lens if keys is None else keys.bounds,
        max_length_q=packed.max_length,
        max_length_k=packed.max_length if keys is None else keys.max_length,
        **sharing,
    )
    return output.last_hidden_state[0].index_select(0, packed.state_index)


def gather_sequence(own: Tensor, packed: Packed) -> Tensor:
    """Gather values of all ranks that share the input, [R] on each of them."""
    if packed.shard is None:
        return own
    return GatherSequence.apply(own, packed.shard.num_responses, packed.shard.group)


def compile_layer(layer: nn.Module) -> None:
    """Compile a layer's forward (fsdp.compile): one graph for all layers and packed lengths.

    Call before FSDP2 wraps the layer; its hooks stay outside. The tokens of the layer's tensor
    arguments are in dim 1, or in their only dim.

    torch.compile generates different code for forwards with and without gradients, and the two
    round differently. Old log-probs must equal those of the update's first forward bit for bit.
    Therefore a compiled layer always runs the code with gradients. Its input always counts as
    differentiable, also that of the first layer, from a frozen embedding.

    Token counts, sequence counts and the longest length differ from call to call. They are symbols
    from the first call on, so nothing is recompiled. A graph break is an error.
    """
    layer.forward = partial(_forward, layer, layer_function(layer))  # type: ignore[method-assign]


def _forward(
    layer: nn.Module,
    run: Callable[..., Any],
    hidden_states: Tensor,
    *more: Tensor | None,
    **kwargs: Any,
) -> Any:
    # A plain int would first be compiled as a constant; a tensor's size is a symbol at once.
    sizes = {name: torch.empty(n, 0) for name, n in kwargs.items() if type(n) is int}
    rest = {name: value for name, value in kwargs.items() if name not in sizes}
    needs_grad = torch.is_grad_enabled()
    differentiable = hidden_states.requires_grad
    states = hidden_states if differentiable else hidden_states.detach().requires_grad_()
    for leaf in tree_leaves((states, more, rest)):
        if isinstance(leaf, Tensor):
            mark_dynamic(leaf, min(leaf.dim() - 1, 1))
    for size in sizes.values():
        mark_dynamic(size, 0)
    with torch.enable_grad():
        output = _compiled(layer, run, (states, *more), sizes, rest)
    return output if needs_grad else tree_map(Tensor.detach, output)


@torch.compile(fullgraph=True)
def _compiled(
    layer: nn.Module,
    run: Callable[..., Any],
    states: tuple[Tensor | None, ...],
    sizes: dict[str, Tensor],
    rest: dict[str, Any],
) -> Any:
    ints = {name: size.shape[0] for name, size in sizes.items()}
    return run(layer, *states, **rest, **ints)
