"""Bytes that a packed forward leaves for its backward, and what both need besides.

Eager layers are counted exactly: tests hold each formula against what autograd saves of the real
layers. Compiled layers are counted as the partitioner of torch 2.11 to 2.13 cut them; what
backward holds for a moment was read off allocations, and is good to a few percent of the total.

Symbols:  h = hidden   I = intermediate   D = head size   H, K = query, key heads   V = vocabulary
          s = bytes of an element in param_dtype
Units:    bytes per token of the packed forward, unless said otherwise
"""

from hybridrl.config.planner.model_shape import ModelShape

# RMSNorm computes in float32 and keeps its input so.
NORM_BYTES = 4


def kept_by_layer(shape: ModelShape, size: int, *, compiled: bool) -> int:
    """What autograd keeps of one decoder layer.

    Eager, in the order of the layer; what two operations save of one tensor counts once:
        RMSNorm, twice    input in float32 (4h), normalised (sh), output (sh), 1/rms (4)
        attention         query and output (2sHD), key and value (2sKD), log-sum-exp (4H)
        Qwen3's q_norm and k_norm    as RMSNorm over D, but for the output: (4 + s)D + 4 per head
        MLP               gate, silu(gate), up and their product (4sI)
    Compiled, what is cheap is computed again: layer input, both norms' outputs, o_proj's output
    (4sh), 1/rms, attention as above, gate, up and product (3sI).

    Args:
        shape: the model's.
        size: s.
        compiled: fsdp.compile.
    """
    h, inner = shape.hidden, shape.intermediate
    attention = 2 * size * (shape.heads + shape.kv_heads) * shape.head_dim + 4 * shape.heads
    if compiled:
        head_norms = 4 * (shape.heads + shape.kv_heads) if shape.kind == "qwen3" else 0
        return 4 * size * h + 8 + attention + head_norms + 3 * size * inner
    norms = 2 * ((NORM_BYTES + 2 * size) * h + 4)
    if shape.kind == "qwen3":
        per_head = (NORM_BYTES + size) * shape.head_dim + 4
        norms += per_head * (shape.heads + shape.kv_heads)
    return norms + attention + 4 * size * inner


def kept_by_checkpoint(shape: ModelShape, size: int) -> int:
    """What activation checkpointing keeps of one layer: its input."""
    return size * shape.hidden


def kept_by_all_layers(shape: ModelShape, size: int) -> int:
    """What the layers share: rotary tables, and the token ids for the embedding's backward."""
    return 2 * size * shape.head_dim + 8


def kept_by_last_norm(shape: ModelShape, size: int) -> int:
    """As in a layer, but for the output, of which only the response tokens' states are kept."""
    return (NORM_BYTES + size) * shape.hidden + 4


def forward_moment(shape: ModelShape, size: int) -> int:
    """The most that a forward without gradients holds, residual stream included.

    That is at the product of gate and up, or in a norm.
    """
    h, inner = shape.hidden, shape.intermediate
    inside = max(3 * size * inner + 4 * size * h, (2 * NORM_BYTES + 6 * size) * h)
    return inside + kept_by_all_layers(shape, size)


def backward_moment(shape: ModelShape, size: int) -> int:
    """The most that a layer's backward holds beyond what is kept.

    Gradients of gate and up, or of a norm, and of the residual stream.
    """
    h, inner = shape.hidden, shape.intermediate
    return max(2 * size * inner + size * h, 5 * size * h)


def last_norm_moment(shape: ModelShape) -> int:
    """What the last norm's backward holds beyond what is kept: float32 throughout."""
    return (4 * NORM_BYTES + 2) * shape.hidden


def kept_by_head(shape: ModelShape, size: int) -> int:
    """What the log-probs keep, per RESPONSE token, beside logits: the state, log Z, an id."""
    return size * shape.hidden + 5 * 4
