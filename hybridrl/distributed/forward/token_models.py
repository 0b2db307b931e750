"""Root modules of FSDP2: a transformers model with a head for log-probs, values or scores.

FSDP2 gathers a root's own weights (embedding, final norm, head) in hooks around the root's
forward. A direct call of the inner model would bypass them, so all computation with weights is in
the forwards here.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybridrl.distributed.forward.attention import has_kernel, warn_of_padding
from hybridrl.distributed.forward.log_probs import (
    Entropy,
    KeptLogits,
    ResponseLogProbs,
    token_log_probs,
)
from hybridrl.distributed.forward.packing import Packed, SequenceShard
from hybridrl.distributed.forward.sequence_parallel import GatherSequence


class TokenLogProbs(nn.Module):
    """Causal language model that returns log-probs of response tokens.

    Args:
        lm: the model; its attention must be "hybridrl_packed".
        chunk_tokens: tokens whose logits are computed at one time.
        keep: logits to keep for backward.
    """

    def __init__(self, lm: PreTrainedModel, chunk_tokens: int, keep: KeptLogits) -> None:
        super().__init__()
        assert lm.get_output_embeddings().bias is None, "a head with bias is not supported"
        self.lm = lm
        self.chunk_tokens = chunk_tokens
        self.keep = keep

    def forward(self, packed: Packed, temperature: float, entropy: Entropy) -> ResponseLogProbs:
        """Compute log-probs (and entropies) of response tokens, [R] float32, nats.

        If ranks share the input, R counts the response tokens of all of them.
        """
        hidden = response_states(self.lm.base_model, packed)
        own = token_log_probs(
            hidden,
            packed.response_ids,
            self.lm.get_output_embeddings().weight,
            temperature=temperature,
            chunk_tokens=self.chunk_tokens,
            entropy=entropy,
            keep=self.keep,
        )
        return ResponseLogProbs(
            gather_sequence(own.log_probs, packed),
            None if own.entropy is None else gather_sequence(own.entropy, packed),
        )


class TokenValues(nn.Module):
    """Backbone of a language model with a scalar head.

    Args:
        backbone: the model below its language-modelling head; attention "hybridrl_packed".
    """

    def __init__(self, backbone: PreTrainedModel) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(
            backbone.config.hidden_size, 1, device=backbone.device, dtype=torch.float32
        )

    def forward(self, packed: Packed) -> Tensor:
        """Compute V(s_t) of the state that predicts each response token, [R] float32.

        If ranks share the input, R counts the response tokens of all of them.
        """
        values = self.head(response_states(self.backbone, packed).float())
        # A copy: FSDP2 hooks backward to this output, which must not be a view.
        return gather_sequence(values.squeeze(-1).clone(), packed)

    def initial_head(self, seed: int) -> dict[str, Tensor]:
        """Draw the new head's weights from the seed; values start near 0."""
        hidden_size = self.head.in_features
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(1, hidden_size, generator=generator) / (hidden_size + 1)
        return {"head.weight": weight, "head.bias": torch.zeros(1)}


class SequenceScores(nn.Module):
    """Backbone of a language model with the score head of transformers' sequence classifiers.

    Args:
        backbone: the model below its head; attention "hybridrl_packed".
    """

    def __init__(self, backbone: PreTrainedModel) -> None:
        super().__init__()
        self.backbone = backbone
        self.score = nn.Linear(
            backbone.config.hidden_size,
            1,
            bias=False,
            device=backbone.device,
            dtype=torch.float32,
        )

    def forward(self, packed: Packed) -> Tensor:
        """Compute the score of each response, [B] float32; packed with States.last."""
        scores = self.score(response_states(self.backbone, packed).float())
        return gather_sequence(scores.squeeze(-1), packed)


def response_states(backbone: PreTrainedModel, packed: Packed) -> Tensor:
    """Compute the final hidden states of positions packed.state_index, [R, H]."""
    output = backbone(
        input_ids=packed.input_ids,
        position_ids=packed.position_ids,
        use_cache=False,
        cu_seq_lens_q=packed.cu_seq_lens,
        cu_seq_lens_k=packed.cu_seq_lens,
        max_length_q=packed.max_length,
        max_length_k=packed.max_length,
        **_sharing(packed.shard),
    )
    hidden = output.last_hidden_state[0]
    head_size = backbone.layers[0].self_attn.head_dim
    if hidden.is_cuda and not has_kernel(hidden.device, hidden.dtype, head_size):
        warn_of_padding(hidden.dtype, head_size)
    return hidden.index_select(0, packed.state_index)


def gather_sequence(own: Tensor, packed: Packed) -> Tensor:
    """Gather values of all ranks that share the input, [R] on each of them."""
    if packed.shard is None:
        return own
    return GatherSequence.apply(own, packed.shard.num_responses, packed.shard.group)


def _sharing(shard: SequenceShard | None) -> dict[str, Any]:
    """Return the arguments of attention for a shared input."""
    if shard is None:
        return {}
    return {"sequence_group": shard.group, "num_shared_tokens": shard.num_tokens}
