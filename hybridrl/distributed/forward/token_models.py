"""The modules FSDP2 wraps as roots: transformers inside, numbers of response tokens outside.

FSDP2 gathers a root's own weights (embedding, final norm, head) in hooks around the root's
forward. Calling the model inside directly would bypass them, so everything that needs weights
happens in the forwards here.
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
from hybridrl.distributed.forward.packing import Packed, Piece
from hybridrl.distributed.forward.sequence_parallel import JoinedPieces


class TokenLogProbs(nn.Module):
    """A causal language model that answers with log-probs of response tokens.

    Args:
        lm: the model; its attention must be "hybridrl_packed".
        chunk_tokens: tokens whose logits are computed at one time.
        keep: whether backward recomputes the logits.
    """

    def __init__(self, lm: PreTrainedModel, chunk_tokens: int, keep: KeptLogits) -> None:
        super().__init__()
        assert lm.get_output_embeddings().bias is None, "a head with bias is not known"
        self.lm = lm
        self.chunk_tokens = chunk_tokens
        self.keep = keep

    def forward(self, packed: Packed, temperature: float, entropy: Entropy) -> ResponseLogProbs:
        """Log-probs (and entropies) of response tokens, [R] float32, nats.

        Of packed.response_ids, or of those of all ranks if the input is shared.
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
            joined(own.log_probs, packed),
            None if own.entropy is None else joined(own.entropy, packed),
        )


class TokenValues(nn.Module):
    """A language model's backbone with a scalar head.

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
        """V(s_t) before each response token, [R] float32: the state that predicts the token.

        Of packed.response_ids, or of those of all ranks if the input is shared.
        """
        values = self.head(response_states(self.backbone, packed).float())
        # A copy: FSDP2 hooks backward to this output, which must not be a view.
        return joined(values.squeeze(-1).clone(), packed)

    def initial_head(self, seed: int) -> dict[str, Tensor]:
        """The new head's weights, a function of the seed: values start near 0."""
        hidden_size = self.head.in_features
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(1, hidden_size, generator=generator) / (hidden_size + 1)
        return {"head.weight": weight, "head.bias": torch.zeros(1)}


class SequenceScores(nn.Module):
    """A language model's backbone with the head of transformers' sequence classification.

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
        """The score of each response, [B] float32; packed with States.last."""
        scores = self.score(response_states(self.backbone, packed).float())
        return joined(scores.squeeze(-1), packed)


def response_states(backbone: PreTrainedModel, packed: Packed) -> Tensor:
    """[R, H]: final hidden states of the positions packed.state_index."""
    output = backbone(
        input_ids=packed.input_ids,
        position_ids=packed.position_ids,
        use_cache=False,
        cu_seq_lens_q=packed.cu_seq_lens,
        cu_seq_lens_k=packed.cu_seq_lens,
        max_length_q=packed.max_length,
        max_length_k=packed.max_length,
        **_sharing(packed.piece),
    )
    hidden = output.last_hidden_state[0]
    head_size = backbone.layers[0].self_attn.head_dim
    if hidden.is_cuda and not has_kernel(hidden.device, hidden.dtype, head_size):
        warn_of_padding(hidden.dtype, head_size)
    return hidden.index_select(0, packed.state_index)


def joined(own: Tensor, packed: Packed) -> Tensor:
    """Numbers of wanted states from all ranks that share the input, [R] on each of them."""
    if packed.piece is None:
        return own
    return JoinedPieces.apply(own, packed.piece.num_responses, packed.piece.group)


def _sharing(piece: Piece | None) -> dict[str, Any]:
    """What attention is told of a shared input."""
    if piece is None:
        return {}
    return {"sequence_group": piece.group, "num_shared_tokens": piece.num_tokens}
