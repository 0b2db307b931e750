"""Activations: bytes kept by a packed forward for its backward, and temporaries of both.

Eager layers are exact: tests compare each formula with autograd's saved tensors. Compiled layers
follow the partitioner of torch 2.11 to 2.13. Temporaries of backward were measured, and are good to
a few percent of the total.

Symbols:  h = hidden   I = intermediate   D = head size   H, K = query, key heads   V = vocabulary
          s = bytes of an element in param_dtype
Units:    bytes per token of the packed forward, unless said otherwise
"""

from hybridrl.config.planner.model_shape import ModelShape

# RMSNorm computes in float32 and keeps its input so.
NORM_BYTES = 4


def kept_by_layer(shape: ModelShape, size: int, *, compiled: bool) -> int:
    """Return the bytes that autograd keeps of one decoder layer.

    Eager, in the order of the layer; a tensor saved by two operations counts once:
        RMSNorm, twice    input in float32 (4h), normalised (sh), output (sh), 1/rms (4)
        attention         query and output (2sHD), key and value (2sKD), log-sum-exp (4H)
        Qwen3's q_norm and k_norm    as RMSNorm over D, but for the output: (4 + s)D + 4 per head
        MLP               gate, silu(gate), up and their product (4sI)
    Compiled, cheap operations are recomputed; kept are layer input, both norms' outputs, o_proj's
    output (4sh), 1/rms, attention as above, gate, up and product (3sI).

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
    """Return the bytes that activation checkpointing keeps of one layer: its input."""
    return size * shape.hidden


def kept_by_all_layers(shape: ModelShape, size: int) -> int:
    """Return the bytes shared by all layers: rotary tables, and token ids for the embedding."""
    return 2 * size * shape.head_dim + 8


def kept_by_last_norm(shape: ModelShape, size: int) -> int:
    """Return the bytes of the last norm; its output is kept only for response tokens."""
    return (NORM_BYTES + size) * shape.hidden + 4


def forward_moment(shape: ModelShape, size: int) -> int:
    """Return the peak of a forward without gradients, residual stream included.

    It is at the product of gate and up, or in a norm.
    """
    h, inner = shape.hidden, shape.intermediate
    inside = max(3 * size * inner + 4 * size * h, (2 * NORM_BYTES + 6 * size) * h)
    return inside + kept_by_all_layers(shape, size)


def backward_moment(shape: ModelShape, size: int) -> int:
    """Return the peak of a layer's temporaries in backward.

    Gradients of gate and up, or of a norm, and of the residual stream.
    """
    h, inner = shape.hidden, shape.intermediate
    return max(2 * size * inner + size * h, 5 * size * h)


def last_norm_moment(shape: ModelShape) -> int:
    """Return the temporaries of the last norm's backward, all float32."""
    return (4 * NORM_BYTES + 2) * shape.hidden


def kept_by_head(shape: ModelShape, size: int) -> int:
    """Return the bytes that log-probs keep per RESPONSE token: the state, log Z, an id."""
    return size * shape.hidden + 5 * 4
